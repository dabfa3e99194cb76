"""``sensitivity train``."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from sensitivity import checkpoint
from sensitivity.cli import commands
from sensitivity.cli.train import command
from sensitivity.errors import InputError
from sensitivity.layers import SPATIAL
from sensitivity.models import BACKBONES, VARIANTS
from sensitivity.traffic import reopen, synthetic_city
from sensitivity.training import Settings
from sensitivity.training.module import ForecastModule
from sensitivity.training.settings import DEVICES, RECIPES
from sensitivity.training.table import score_table

SMALL = ["--data", "synthetic:nodes=3,days=2", "--dim", "4", "--depth", "1", "--heads", "2", "--batch-size", "64"]


def train(*args: str) -> Result:
    return CliRunner().invoke(commands, ["train", *args], prog_name="sensitivity")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("cli") / "run"
    return train(*SMALL, "--epochs", "2", "--lr", "0.002", "--variant", "penalty", "--out", str(out)), out


def test_the_table_fits_and_stands_alone_on_standard_output(run: tuple[Result, Path]) -> None:
    result, out = run
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    metrics = json.loads((out / "metrics.json").read_text())
    assert "\n".join(lines[:7]) == score_table(metrics)
    assert f"{metrics['test']['12']['mae']:.3f}"[:5] in lines[3]
    assert "training windows per second" in result.stdout
    assert f"best epoch: {metrics['best_epoch']} of 2" in result.stdout
    assert lines[-1] == f"wrote: {out / 'ckpt.pt'}, {out / 'metrics.json'}"


def test_what_is_written(run: tuple[Result, Path]) -> None:
    _, out = run
    content = torch.load(out / "ckpt.pt", weights_only=True)
    assert content["config"]["diagonal"] == {"kind": "penalty", "value": -0.05}
    assert content["training"]["lr"] == 0.002
    assert content["data"]["protocol"] == "dcrnn"
    assert checkpoint.load(out / "ckpt.pt").model.nodes == 3


def test_resume_takes_what_is_not_typed_from_the_run(run: tuple[Result, Path]) -> None:
    result, out = run
    again = train("--resume", "--out", str(out))
    assert again.exit_code == 0, again.stderr
    assert again.stdout == result.stdout
    other = train("--resume", "--out", str(out), "--dim", "8")
    assert other.exit_code == 2
    assert other.stderr.startswith(f"Error: the run in {out} has dim=4, so it cannot be resumed with 8;")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--heads", "3"], "Error: dim=4 is not divisible by heads=3"),
        (["--epochs", "0"], "Error: epochs must be an integer of at least 1, not 0."),
        (["--data", "nowhere.h5"], "Error: there is no file nowhere.h5"),
        (["--data", "."], "Error: . is a directory"),
        (["--resume"], "Error: there is no run to resume in"),
        (["--dropout", "1"], "Error: dropout must be a rate of at least 0 and below 1, not 1.0."),
        (["--seed", "-1"], "Error: Invalid value for '--seed'"),
        (["--protocol", "mine"], "Error: Invalid value for '--protocol'"),
        (["--key", "speed"], "Error: --key speed goes with a traffic file; the synthetic city has one table."),
        (["--channel", "1"], "Error: --channel 1 goes with a traffic file; the synthetic city has one table."),
        (["--channel", "-1"], "Error: channel must be an integer of at least 0, not -1."),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(tmp_path: Path, args: list[str], text: str) -> None:
    out = tmp_path / "run"
    result = train(*SMALL, "--out", str(out), *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(text)
    assert len(result.stderr.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = train(*SMALL, "--out", name)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "Error: --out is empty; name a folder.\n")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="out is empty; name the folder of the run"):
        Settings(out=name)


def tables(path: Path) -> Path:
    """A file of two tables of two channels."""
    city = synthetic_city(nodes=3, days=2).speed.numpy()
    np.savez(path, north=np.stack([city + 1, city], axis=-1), south=np.stack([city, city + 2], axis=-1))
    return path


def test_a_graph_that_is_missing_is_asked_for_by_its_option(tmp_path: Path) -> None:
    args = ["--data", str(tables(tmp_path / "a.npz")), "--key", "south", "--spatial", "distance"]
    result = train(*SMALL, *args, "--out", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert (
        "Error: spatial='distance' needs the road graph, but a has none; name its file with --graph (graph= in "
        "Python), or choose 'adaptive'.\n"
    ) in result.stderr
    assert not (tmp_path / "run").exists()


def test_one_table_of_several_is_trained_on_and_found_again(tmp_path: Path) -> None:
    args = ["--data", str(tables(tmp_path / "a.npz")), "--key", "south", "--channel", "1", "--epochs", "1"]
    out = tmp_path / "run"
    result = train(*SMALL, *args, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    loaded = checkpoint.load(out / "ckpt.pt")
    assert (loaded.training["key"], loaded.training["channel"]) == ("south", 1)
    assert loaded.data["options"] == {"key": "south", "channel": 1}
    assert float(reopen(loaded.data).speed[0, 0]) == float(synthetic_city(nodes=3, days=2).speed[0, 0]) + 2
    assert train("--resume", "--out", str(out)).exit_code == 0
    other = train("--resume", "--out", str(out), "--channel", "0")
    assert f"Error: the run in {out} has channel=1, so it cannot be resumed with 0;" in other.stderr


class Disk:
    """A disk that is full for one file from the given write on."""

    def __init__(self, name: str, first: int) -> None:
        self.name, self.left, self.write = name, first, Path.write_bytes

    def __call__(self, path: Path, data: bytes) -> int:
        if path.name.startswith(f".{Path(self.name).stem}."):
            self.left -= 1
            if self.left <= 0:
                self.write(path, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
        return self.write(path, data)


@pytest.mark.parametrize("name", ["last.ckpt", "ckpt.pt", "log.csv"])
def test_a_full_disk_ends_the_run_in_one_sentence_and_it_resumes(
    run: tuple[Result, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out, args = tmp_path / "run", [*SMALL, "--epochs", "2", "--lr", "0.002", "--variant", "penalty"]
    disk = Disk(name, first=2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda path, data: disk(path, data))
        result = train(*args, "--out", str(out))
    sentence = f"Error: cannot write {out / name}: the disk is full; free some space or choose another folder.\n"
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", sentence)
    assert not list(out.glob(".*"))
    assert checkpoint.load(out / "ckpt.pt").training["best_epoch"] == 1
    assert torch.load(out / "last.ckpt", weights_only=True)["epoch"] in (1, 2)
    resumed = train("--resume", "--out", str(out))
    assert resumed.exit_code == 0, resumed.stderr
    ours, whole = (json.loads((folder / "metrics.json").read_text()) for folder in (out, run[1]))
    assert ours | {"windows_per_second": 0} == whole | {"windows_per_second": 0}


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); from sensitivity.cli import main"
    args = [sys.executable, "-c", f"{limit}; main()", "train", *SMALL, "--epochs", "1", "--out", str(tmp_path / "run")]
    ended = subprocess.run(args, capture_output=True, text=True, timeout=120)
    file = tmp_path / "run/last.ckpt"
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"Error: cannot write {file}: the disk is full; free some space or choose another folder.\n"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["settings.json"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_without_permission_is_told_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    out = tmp_path / "run"
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(ForecastModule, "training_step", lambda *_: pytest.fail("trained"))
    result = train(*SMALL, "--out", str(out))
    sentence = f"Error: cannot write {out / 'settings.json'}: no permission in the folder {out}; choose another folder."
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"{sentence}\n")


def test_an_existing_run_and_a_file_are_refused(run: tuple[Result, Path], tmp_path: Path) -> None:
    result = train(*SMALL, "--out", str(run[1]))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "already holds a run" in result.stderr
    (tmp_path / "file").write_text("mine")
    result = train(*SMALL, "--out", str(tmp_path / "file" / "run"))
    assert result.exit_code == 2
    assert "is not a folder; choose another place." in result.stderr


def test_options_and_settings_agree() -> None:
    options = {parameter.name: parameter for parameter in command.params}
    fields = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert set(options) == set(fields) - {"input_length", "horizon"}
    for name, option in options.items():
        if name != "out" and fields[name] is not None:
            assert option.get_default(click.Context(command)) == fields[name], name
    choices = {"variant": VARIANTS, "spatial": SPATIAL, "device": DEVICES, "protocol": ("dcrnn", "paper")}
    choices |= {"backbone": BACKBONES, "recipe": RECIPES}
    for name, known in choices.items():
        assert set(options[name].type.choices) == set(known)


LONGER = [*SMALL, "--epochs", "5", "--batch-size", "8", "--dropout", "0.2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert train(*LONGER, "--out", str(out)).exit_code == 0
    return json.loads((out / "metrics.json").read_text())


def start(out: Path) -> subprocess.Popen[str]:
    args = [sys.executable, "-m", "sensitivity.cli", "train", *LONGER, "--out", str(out)]
    return subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stop(process: subprocess.Popen[str], out: Path, sent: signal.Signals) -> tuple[int, str, str]:
    """Sends a signal in the middle of an epoch that is not the first."""
    deadline = time.monotonic() + 60
    while not (out / "last.ckpt").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, sent)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr.strip()


def test_a_stopped_run_resumes_to_the_same_numbers(whole: dict[str, object], tmp_path: Path) -> None:
    outs = {sent: tmp_path / sent.name for sent in (signal.SIGINT, signal.SIGKILL)}
    processes = {sent: start(out) for sent, out in outs.items()}
    with ThreadPoolExecutor() as pool:
        waiting = {sent: pool.submit(stop, processes[sent], out, sent) for sent, out in outs.items()}
    ends = {sent: future.result() for sent, future in waiting.items()}
    way = f"sensitivity train --resume --out {outs[signal.SIGINT]} goes on."
    assert ends[signal.SIGINT] == (130, "", f"Interrupted; the completed epochs are kept: {way}")
    assert ends[signal.SIGKILL] == (-signal.SIGKILL, "", "")
    for out in outs.values():
        assert not (out / "metrics.json").exists()
        resumed = train("--resume", "--out", str(out))
        assert resumed.exit_code == 0, resumed.stderr
        ours = json.loads((out / "metrics.json").read_text())
        assert ours | {"windows_per_second": 0} == whole | {"windows_per_second": 0}


def test_table_of_other_steps_and_missing_scores() -> None:
    scores = {"mae": 1.23456, "rmse": 12.3456, "mape": None}
    metrics = {"test": {"3": scores, "average": scores}, "naive": {}, "data": {"step_minutes": 15.0}}
    assert score_table(metrics, "a name that is too long for its place").splitlines() == [
        "test error                        45 min",
        "                       MAE   RMSE   MAPE",
        "----------------------------------------",
        "a name that is too l 1.235  12.35      -",
    ]
