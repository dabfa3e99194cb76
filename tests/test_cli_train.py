"""``sensitivity train``."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

from sensitivity import checkpoint
from sensitivity.cli import commands
from sensitivity.cli.train import command
from sensitivity.layers import SPATIAL
from sensitivity.models import BACKBONES, VARIANTS
from sensitivity.training import Settings
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
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(tmp_path: Path, args: list[str], text: str) -> None:
    out = tmp_path / "run"
    result = train(*SMALL, "--out", str(out), *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(text)
    assert len(result.stderr.splitlines()) == 1
    assert not out.exists()


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
