"""``sensitivity measure``."""

from __future__ import annotations

import io
import json
import math
import pickle
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from sensitivity import SoftmaxAttention, checkpoint, measure
from sensitivity.cli import commands
from sensitivity.cli.measuring import table
from sensitivity.models import Forecaster, STAEformer, variant_diagonal
from sensitivity.sweep import RandomTokens, Sweep, sweep
from sensitivity.traffic import describe, sequences, split, synthetic_city, write

CITY = {"nodes": 3, "days": 3, "seed": 1}


def run(*args: str) -> Result:
    return CliRunner().invoke(commands, ["measure", *args], prog_name="sensitivity")


@pytest.fixture(autouse=True)
def _no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than everything else: they are drawn where a test looks at them."""
    if request.node.get_closest_marker("usefixtures") is None:
        monkeypatch.setattr("sensitivity.cli.measuring.figures.draw", lambda found, folder: [])


@pytest.fixture
def figures() -> None:
    """For ``usefixtures``: figures are drawn."""


def forecaster(seed: int = 0, **options: Any) -> Forecaster:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Forecaster(**({"nodes": 3, "dim": 8, "depth": 2, "heads": 2} | options)).eval()


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    traffic = synthetic_city(**CITY)
    data = describe(traffic) | {"protocol": "dcrnn", "input_length": 12, "horizon": 12}
    path = tmp_path_factory.mktemp("model") / "ckpt.pt"
    checkpoint.save(path, forecaster(), scaler=split(traffic).scaler, data=data)
    return path


@pytest.fixture(scope="module")
def done(ckpt: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("measured") / "results"
    return run("--model", str(ckpt), "--lengths", "6,12,24,48", "--samples", "3", "--out", str(out)), out


def refused(result: Result, text: str) -> None:
    """One sentence on standard error, exit 2, nothing on standard output."""
    assert result.exit_code == 2, result.output
    assert text in result.stderr
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


# -- what is printed and written -----------------------------------------------------------------------------------


def test_the_tables_fit_eighty_columns(done: tuple[Result, Path]) -> None:
    result, _ = done
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    tables = lines[: next(i for i, line in enumerate(lines) if line.startswith("wrote "))]
    assert max(map(len, tables)) <= 80
    assert not any("…" in line for line in lines)
    for title in (
        "Sensitivity at T=48",
        "Paths and attention at T=48",
        "Decay as T^-b over T=6...48",
        "Bounds, checked",
    ):
        assert any(line.startswith(title) for line in lines), title
    assert lines[0] == "2 attention layers of ckpt.pt (Forecaster) on synthetic city"


def test_what_is_written(done: tuple[Result, Path]) -> None:
    _, out = done
    assert sorted(path.name for path in out.iterdir()) == [
        "decay.png", "heatmap_blocks.0.temporal.png", "heatmap_blocks.1.temporal.png", "lag_profile.png",
        "measurement.nc", "path_shares.png", "summary.json",
    ]  # fmt: skip
    assert all((out / name).read_bytes()[:4] == b"\x89PNG" for name in ("decay.png", "path_shares.png"))
    summary = json.loads((out / "summary.json").read_text())
    assert summary == json.loads(json.dumps(Sweep.load(out / "measurement.nc").summary()))
    assert [entry["name"] for entry in summary["layers"]] == ["blocks.0.temporal", "blocks.1.temporal"]
    provenance = summary["provenance"]
    assert provenance["data"]["name"] == "synthetic city"
    assert provenance["lengths"] == [6, 12, 24, 48]
    assert provenance["samples"] == 3
    assert provenance["dtype"] == "float32"
    assert len(provenance["model"]["sha256"]) == 64
    assert str(out) not in (out / "summary.json").read_text()
    assert all(bound["violations"] == 0 for entry in summary["layers"] for bound in entry["bounds"].values())


def test_the_numbers_are_those_of_the_front_door(done: tuple[Result, Path], ckpt: Path) -> None:
    _, out = done
    entry = json.loads((out / "summary.json").read_text())["layers"][1]
    loaded, traffic = checkpoint.load(ckpt), synthetic_city(**CITY)
    tokens = sequences(traffic, split(traffic).scaler, 48, 3, 0, longest=48)

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = loaded.model

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner.encode(inputs)

    found = measure(Encoder().eval(), tokens, layer="inner.blocks.1.temporal")
    assert entry["length"] == 48
    assert entry["sink_ratio"]["raw"] == pytest.approx(float(found.sink_ratio()), rel=1e-4)
    assert entry["sink_ratio"]["residual_removed"] == pytest.approx(float(found.sink_ratio(True)), rel=1e-3)
    assert entry["diagonal_attention"]["mean"] == pytest.approx(float(found.diagonal_attention()), rel=1e-5)


def test_json_is_the_summary_and_nothing_else(done: tuple[Result, Path], ckpt: Path, tmp_path: Path) -> None:
    args = ["--model", str(ckpt), "--lengths", "6,12,24,48", "--samples", "3"]
    result = run(*args, "--json", "--out", str(tmp_path / "again"))
    assert result.stdout == (tmp_path / "again" / "summary.json").read_text()
    assert result.stdout == (done[1] / "summary.json").read_text()
    json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))


def test_another_process_and_another_seed(done: tuple[Result, Path], ckpt: Path, tmp_path: Path) -> None:
    args = ["measure", "--model", str(ckpt), "--lengths", "6", "--samples", "3", "--json"]
    code = "import torch; torch.set_num_threads(1); from sensitivity.cli import main; main()"
    call = [sys.executable, "-c", code, *args, "--out", str(tmp_path / "a")]
    other = subprocess.run(call, capture_output=True, text=True, check=True, cwd=tmp_path)
    here = run(*args[1:], "--out", str(tmp_path / "b"))
    first, second = (json.loads(text)["layers"][0]["off_diagonal"] for text in (other.stdout, here.stdout))
    assert first == second
    third = json.loads(run(*args[1:], "--seed", "5", "--out", str(tmp_path / "c")).stdout)["layers"][0]["off_diagonal"]
    assert third != first


def test_one_layer_and_the_default_lengths(ckpt: Path, tmp_path: Path) -> None:
    args = ["--model", str(ckpt), "--layers", "blocks.1.temporal", "--samples", "2", "--norm", "rms"]
    summary = json.loads(run(*args, "--json", "--out", str(tmp_path / "out")).stdout)
    assert [entry["name"] for entry in summary["layers"]] == ["blocks.1.temporal"]
    assert [one["length"] for one in summary["layers"][0]["per_length"]] == [12, 24, 48, 96]
    assert summary["provenance"]["norm"] == "rms"
    assert summary["layers"][0]["paths"]["diagonal"]["residual"] == pytest.approx(1)
    assert Sweep.load(tmp_path / "out" / "measurement.nc").kept("blocks.1.temporal") == (12, 96)


def test_some_sensors(ckpt: Path, tmp_path: Path) -> None:
    args = ["--model", str(ckpt), "--lengths", "6", "--samples", "2", "--sensors", "2", "--out", str(tmp_path / "out")]
    result = run(*args)
    assert "2 test windows x 2 of 3 sensors at every length" in result.stdout
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["layers"][0]["per_length"][0]["samples"] == 4


@pytest.mark.usefixtures("figures")
def test_spectral_norms(ckpt: Path, tmp_path: Path) -> None:
    args = ["--model", str(ckpt), "--lengths", "6", "--samples", "1", "--norm", "spectral"]
    result = run(*args, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.stderr
    assert "no decay exponents" in result.stdout.lower()
    assert not (tmp_path / "out" / "decay.png").exists()


# -- random layers -----------------------------------------------------------------------------------------------------


def test_random_layers(tmp_path: Path) -> None:
    args = ["--random", "dim=12,heads=3,gain=0.5,layers=2", "--lengths", "8,...,64", "--samples", "4", "--json"]
    summary = json.loads(run(*args, "--out", str(tmp_path / "out")).stdout)
    assert [entry["name"] for entry in summary["layers"]] == ["random.0", "random.1"]
    assert summary["provenance"]["dtype"] == "float64"
    for entry in summary["layers"]:
        assert entry["decay"]["off_diagonal"]["exponent"] == pytest.approx(1, abs=0.05)
        assert entry["decay"]["diagonal"]["exponent"] == pytest.approx(0, abs=0.05)
        assert all(bound["violations"] == 0 for bound in entry["bounds"].values())
    attention = SoftmaxAttention.random(12, 3, gain=0.5, seed=0, dtype=torch.float64)
    same = sweep(RandomTokens(attention, 4), [64], bounds=()).record("attention").statistics["off_diagonal"]
    assert summary["layers"][0]["off_diagonal"] == float(same)


def test_random_layers_with_options(tmp_path: Path) -> None:
    args = ["--random", "dim=8,heads=2,causal=true,mask=yes,residual=false,biases=1", "--lengths", "4,8", "--json"]
    entry = json.loads(run(*args, "--out", str(tmp_path / "out")).stdout)["layers"][0]
    assert entry["name"] == "random"
    assert entry["diagonal_attention"]["mean"] == pytest.approx(1 / 8)  # the first row has no other key to see
    assert entry["paths"]["diagonal"]["residual"] == 0


@pytest.mark.parametrize(("args", "text"), [
    (["--random", "dim=12,width=3"], "--random takes dim=..., heads=..., gain=..., causal=..., residual=..., "
     "biases=..., mask=..., layers=...; 'width=3' is none of them."),
    (["--random", "dim=12,heads=5"], "dim=12 is not divisible by heads=5; nearest that fit: 10 and 15."),
    (["--random", "dim=a"], "--random: dim must be an integer, not 'a'."),
    (["--random", "causal=maybe"], "--random: causal must be true or false, not 'maybe'."),
    (["--random", "layers=0"], "--random: layers must be at least 1, not 0."),
    (["--random", "dim=8,heads=2", "--lengths", "0,4"], "lengths must be at least 1, not 0."),
    (["--random", "dim=8,heads=2", "--lengths", "4,x"], "lengths must be integers, but '4,x' has 'x'"),
    (["--random", "dim=8,heads=2", "--lengths", "4.5"], "lengths must be integers, but '4.5' has '4.5'"),
    (["--random", "dim=8,heads=2", "--samples", "0"], "--samples must be at least 1, not 0."),
    (["--random", "dim=8,heads=2", "--sensors", "2"], "--random draws its own layers and tokens, so --sensors has no"),
    (["--model", "x.pt", "--sensors", "0"], "--sensors must be at least 1, not 0."),
    (["--random", "dim=8,heads=2", "--data", "x.h5"], "--random draws its own layers and tokens, so --data has no "
     "meaning; leave it out."),
    (["--random", "dim=8", "--model", "x.pt"], "say what to measure, either with --model FILE or with --random"),
    ([], "say what to measure, either with --model FILE or with --random dim=72,heads=8."),
])  # fmt: skip
def test_bad_options(args: list[str], text: str, tmp_path: Path) -> None:
    refused(run(*args, "--out", str(tmp_path / "out")), text)
    assert not (tmp_path / "out").exists()


# -- checkpoints that cannot be used -----------------------------------------------------------------------------------


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (self.mark,)


def test_checkpoints_that_cannot_be_read(ckpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    mark = tmp_path / "ran"
    torch.save({"weights": Payload(mark)}, tmp_path / "code.pt")
    torch.save({"answer": 42}, tmp_path / "other.pt")
    torch.save({"layer.weight": torch.ones(2, 2)}, tmp_path / "weights.pt")
    whole = ckpt.read_bytes()
    broken = forecaster()
    with torch.no_grad():
        broken.embedding.weight[0, 0] = math.nan
    torch.save({"state_dict": broken.state_dict(), "config": broken.config}, tmp_path / "nan.pt")
    config = forecaster().config | {"heads": 3}
    torch.save({"state_dict": forecaster().state_dict(), "config": config}, tmp_path / "heads.pt")
    cases = [
        (tmp_path / "none.pt", "none.pt"),
        (tmp_path, "is a directory, not a checkpoint"),
        (written(tmp_path / "cut.pt", whole[: len(whole) // 2]), "cut.pt"),
        (written(tmp_path / "text.pt", b"hello, world"), "text.pt"),
        (tmp_path / "code.pt", "--trust-pickle"),
        (tmp_path / "other.pt", "checkpoint of another kind"),
        (tmp_path / "weights.pt", "--builder package.module:function"),
        (tmp_path / "nan.pt", "NaN"),
        (tmp_path / "heads.pt", "dim=8 is not divisible by heads=3"),
    ]
    for path, text in cases:
        refused(run("--model", str(path), "--out", str(out)), text)
    assert not out.exists()
    assert not mark.exists()
    assert pickle.dumps(1)  # the payload would have run: it does when it is trusted
    run("--model", str(tmp_path / "code.pt"), "--trust-pickle", "--out", str(out))
    assert mark.exists()


@pytest.mark.parametrize(("args", "text"), [
    (["--layers", "blocks.7.temporal"], "unknown layer 'blocks.7.temporal'; this model has blocks.0.temporal, "
     "blocks.1.temporal."),
    (["--layers", ","], "--layers is empty"),
    (["--lengths", "12,5000"], "length 5000 is longer than the data, which has 864 rows."),
    (["--lengths", "860"], "ask for fewer samples, shorter lengths or part='all'"),
    (["--samples", "1000"], "fewer than the 1000 samples"),
    (["--samples", "-3"], "--samples must be at least 1, not -3."),
    (["--graph", "adj.pkl"], "--graph adj.pkl belongs to a traffic file; name that with --data."),
    (["--data", "none.h5"], "none.h5"),
    (["--data", "synthetic:nodes=5,days=2"], "synthetic city has 5 sensors, but the model was built for 3"),
    (["--builder", "nowhere"], "--builder takes package.module:function, not 'nowhere'."),
])  # fmt: skip
def test_bad_input_beside_a_good_checkpoint(args: list[str], text: str, ckpt: Path, tmp_path: Path) -> None:
    refused(run("--model", str(ckpt), *args, "--out", str(tmp_path / "out")), text)
    assert not (tmp_path / "out").exists()


def test_an_unknown_norm_is_a_usage_error(ckpt: Path) -> None:
    result = run("--model", str(ckpt), "--norm", "max")
    assert result.exit_code == 2
    assert "'max' is not one of 'frobenius', 'rms', 'spectral'" in result.stderr


# -- which data --------------------------------------------------------------------------------------------------------


def test_named_data(ckpt: Path, tmp_path: Path) -> None:
    write(synthetic_city(nodes=3, days=2, seed=9), tmp_path / "other.npz")
    args = ["--model", str(ckpt), "--lengths", "6", "--samples", "2", "--json"]
    summary = json.loads(run(*args, "--data", str(tmp_path / "other.npz"), "--out", str(tmp_path / "a")).stdout)
    assert summary["provenance"]["data"]["rows"] == 576
    assert "--data other.npz" in summary["provenance"]["command"]
    summary = json.loads(run(*args, "--data", "synthetic", "--out", str(tmp_path / "b")).stdout)
    assert summary["provenance"]["data"]["nodes"] == 3


@pytest.mark.parametrize("name", ["a.npz", "a.h5"])
def test_one_table_of_several_is_found_again_by_the_checkpoint(tmp_path: Path, name: str) -> None:
    import h5py

    from sensitivity.traffic import read

    city = synthetic_city(nodes=3, days=2).speed.numpy()
    arrays = {"north": np.stack([city + 1, city], axis=-1), "south": np.stack([city, city + 2], axis=-1)}
    if name.endswith(".npz"):
        np.savez(tmp_path / name, **arrays)
    else:
        with h5py.File(tmp_path / name, "w") as file:
            for key, values in arrays.items():
                file[key] = values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        described = describe(read(tmp_path / name, key="south", channel=1))
    checkpoint.save(tmp_path / "ckpt.pt", forecaster(), data=described)
    args = ["--model", str(tmp_path / "ckpt.pt"), "--lengths", "6", "--samples", "2", "--json"]
    found = [run(*args, "--out", str(tmp_path / "a"))]
    which = ["--data", str(tmp_path / name), "--key", "south"]
    found += [run(*args, *which, "--channel", channel, "--out", str(tmp_path / channel)) for channel in ("1", "0")]
    assert [one.exit_code for one in found] == [0, 0, 0], [one.stderr for one in found]
    again, named, other = (json.loads(one.stdout) for one in found)
    assert again["layers"] == named["layers"] != other["layers"]
    assert "--key south --channel 1" in named["provenance"]["command"]


@pytest.mark.parametrize(("option", "value"), [("key", "south"), ("channel", "1"), ("graph", "g.csv")])
def test_what_belongs_to_a_traffic_file_needs_one(ckpt: Path, option: str, value: str) -> None:
    result = run("--model", str(ckpt), f"--{option}", value)
    assert result.exit_code == 2
    assert result.stderr == f"Error: --{option} {value} belongs to a traffic file; name that with --data.\n"
    result = run("--random", "dim=4,heads=2", f"--{option}", value)
    assert f"--random draws its own layers and tokens, so --{option} has no meaning; leave it out." in result.stderr
    city = run("--model", str(ckpt), "--data", "synthetic", f"--{option}", value)
    assert city.exit_code == 2
    assert f"Error: --{option} {value} goes with a traffic file; the synthetic city has" in city.stderr


def test_an_empty_folder_is_refused(ckpt: Path) -> None:
    result = run("--model", str(ckpt), "--out", "")
    assert (result.exit_code, result.stderr) == (2, "Error: --out is empty; name a folder.\n")


def test_training_data_that_is_gone_is_replaced_and_that_is_said(tmp_path: Path) -> None:
    write(synthetic_city(nodes=3, days=2), tmp_path / "gone.npz")
    from sensitivity.traffic import read

    checkpoint.save(tmp_path / "ckpt.pt", forecaster(), data=describe(read(tmp_path / "gone.npz")))
    (tmp_path / "gone.npz").unlink()
    result = run("--model", str(tmp_path / "ckpt.pt"), "--lengths", "6", "--samples", "2", "--out", str(tmp_path / "o"))
    assert result.exit_code == 0, result.stderr
    assert (
        "Warning: measured on the synthetic city, not on what the model was trained on: the described" in result.stderr
    )
    assert (
        f"the described traffic file {tmp_path / 'gone.npz'} is gone; say where it is now with --data." in result.stderr
    )
    assert "measured on the synthetic city, not on gone.npz" in result.stdout
    assert "the checkpoint has no scaler" in result.stdout
    assert any(
        "synthetic city" in note
        for note in json.loads((tmp_path / "o/summary.json").read_text())["provenance"]["notes"]
    )


def test_a_checkpoint_that_does_not_say_its_data(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ckpt.pt", forecaster())
    result = run("--model", str(tmp_path / "ckpt.pt"), "--lengths", "6", "--samples", "2", "--out", str(tmp_path / "o"))
    text = " ".join(result.stdout.split())
    assert "the checkpoint does not say what it was trained on: measured on the synthetic city" in text


def test_a_builder_for_foreign_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from sensitivity.models import Forecaster\n"
        "def build():\n    return Forecaster(nodes=3, dim=8, depth=1, heads=2)\n"
    )
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in forecaster(depth=1).state_dict().items()}}, tmp_path / "w.pt"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    args = ["--model", "w.pt", "--builder", "mine:build", "--lengths", "6", "--samples", "2", "--out", "out"]
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    assert "stripped 'module.'" in result.stdout


def test_a_length_that_the_model_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Forecaster.encode

    def short(self: Forecaster, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.shape[1] > 12:
            raise RuntimeError("positions for 12 steps only")
        return encode(self, inputs)

    monkeypatch.setattr(Forecaster, "encode", short)
    checkpoint.save(tmp_path / "ckpt.pt", forecaster())
    args = ["--lengths", "6,12,24", "--samples", "2", "--json"]
    result = run("--model", str(tmp_path / "ckpt.pt"), *args, "--out", str(tmp_path / "o"))
    assert "Warning: T=24 was not measured: RuntimeError: positions for 12 steps only." in result.stderr
    summary = json.loads(result.stdout)
    assert [one["length"] for one in summary["layers"][0]["per_length"]] == [6, 12]
    assert summary["failures"] == [{"length": 24, "reason": "RuntimeError: positions for 12 steps only"}]
    none = run("--model", str(tmp_path / "ckpt.pt"), "--lengths", "24", "--samples", "2", "--out", str(tmp_path / "p"))
    assert none.exit_code == 1
    assert "no length could be measured; T=24: RuntimeError: positions for 12 steps only" in none.stderr
    assert not (tmp_path / "p").exists()


# -- the folder --------------------------------------------------------------------------------------------------------


def test_results_of_other_settings_are_not_overwritten(done: tuple[Result, Path], ckpt: Path, tmp_path: Path) -> None:
    _, out = done
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    refused(
        run("--model", str(ckpt), "--lengths", "6,12", "--samples", "3", "--out", str(out)),
        f"{out} holds results of other settings; choose another folder with --out.",
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    file = written(tmp_path / "file", b"x")
    refused(run("--random", "dim=4,heads=1", "--lengths", "4", "--out", str(file)), "is a file; name a folder.")
    below = run("--random", "dim=4,heads=1", "--lengths", "4", "--out", str(file / "below"))
    refused(below, "Not a directory; choose another folder.")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "summary.json").write_text("[1]")
    refused(
        run("--random", "dim=4,heads=1", "--lengths", "4", "--out", str(tmp_path / "foreign")),
        "holds results of other settings",
    )


def test_the_same_settings_may_be_measured_again(tmp_path: Path) -> None:
    args = ["--random", "dim=4,heads=1", "--lengths", "4,8", "--samples", "2", "--out", str(tmp_path / "out")]
    assert run(*args).exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.suffix != ".nc"}
    assert run(*args).exit_code == 0
    again = run(*args, "--resume")
    assert "measured T=" not in again.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.suffix != ".nc"} == before


def test_an_interrupted_measurement_is_resumed(tmp_path: Path) -> None:
    args = ["measure", "--random", "dim=16,heads=4", "--lengths", "4,8,1024", "--samples", "40"]
    call = [sys.executable, "-m", "sensitivity.cli", *args, "--out", str(tmp_path / "out")]
    parts = tmp_path / "out" / ".parts"
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and len(list(parts.glob("T*.nc"))) < 2:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert "add --resume to take them up" in stderr
    assert not (tmp_path / "out" / "summary.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert len(kept) == 2
    assert {name.split("-")[0] for name in kept} == {"T4", "T8"}


def test_resuming_takes_up_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["--random", "dim=8,heads=2", "--lengths", "4,6,8", "--samples", "2", "--out", str(tmp_path / "out")]
    draw = RandomTokens.__call__
    calls: list[int] = []

    def stopping(self: RandomTokens, length: int) -> Any:
        calls.append(length)
        if length == 8 and calls.count(8) == 1:
            raise KeyboardInterrupt
        return draw(self, length)

    monkeypatch.setattr(RandomTokens, "__call__", stopping)
    stopped = run(*args)
    assert stopped.exit_code == 130
    assert "Interrupted; finished lengths are kept in" in stopped.stderr
    resumed = run(*args, "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert calls == [4, 6, 8, 8]
    assert not (tmp_path / "out" / ".parts").exists()


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "names"), [
    (["blocks.0.temporal", "blocks.1.temporal"], ["blocks.0.temporal", "blocks.1.temporal"]),
    (["encoder.layers.0.self_attn", "encoder.layers.11.self_attn"], ["0", "11"]),
    (["a_layer_with_a_long_name_of_its_own"], ["a_laye...its_own"]),
    (["encoder.layers.0.self_attention", "decoder.layers.0.self_attention"], ["encoder", "decoder"]),
])  # fmt: skip
def test_long_names_are_shortened_to_what_tells_them_apart(layers: list[str], names: list[str]) -> None:
    short = table.short_names(layers)
    assert [short[layer] for layer in layers] == names
    assert all(len(name) <= table.NAME for name in names)


def test_wide_numbers_and_long_names_stay_within_eighty_columns() -> None:
    layers = {f"transformer.encoder.{n}.self_attn": SoftmaxAttention.random(4, 1, seed=n, gain=g, dtype=torch.float64)
              for n, g in enumerate((0.01, 1.0, 30.0))}  # fmt: skip
    found = sweep(RandomTokens(layers, 3), [1, 2, 4, 8, 16, 32])
    console = Console(width=80, record=True, file=io.StringIO())
    table.show(found, ["a line"], console)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "layers are named by what tells them apart: 0 is transformer.encoder.0.self_attn" in " ".join(text.split())


def test_tokens_in_an_order_are_marked_where_a_bound_is_read_as_a_mean_over_orders() -> None:
    attention = SoftmaxAttention.random(4, 1, dtype=torch.float64)
    steps = torch.linspace(-2, 2, 16, dtype=torch.float64)[:, None].expand(8, 16, 4)
    noise = torch.randn(8, 16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shown = {}
    for name, tokens in (("trend", steps + 0.1 * noise), ("noise", noise)):
        console = Console(width=80, record=True, file=io.StringIO())
        table.show(sweep(lambda _, tokens=tokens: {"one": (attention, tokens)}, [16]), [], console)
        shown[name] = console.export_text()
    assert "expected *" in shown["trend"]
    assert "local *" not in shown["trend"]
    assert "a permutation test finds an order" in shown["trend"]
    assert "*" not in shown["noise"]


@pytest.mark.parametrize(("value", "text"), [(0.97123, "0.971"), (88.123, "88.1"), (507.2, "507"), (0.000976, "9.8e-4"),
                                             (0.0, "0"), (math.nan, "-"), (math.inf, "inf"), (None, "-"),
                                             (123456.0, "1.2e5")])  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert table._number(value) == text


# -- regularisers and the day of the week ----------------------------------------------------------------------------


def kept_checkpoint(path: Path, model: torch.nn.Module) -> Path:
    """A checkpoint of an untrained model, as a training run leaves it."""
    traffic = synthetic_city(**CITY)
    data = describe(traffic) | {"protocol": "dcrnn", "input_length": 12, "horizon": 12}
    checkpoint.save(path, model.eval(), scaler=split(traffic).scaler, data=data)
    return path


def recorded(model: torch.nn.Module, inputs: torch.Tensor, layer: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A layer of the model, and the tokens that it gets when the model encodes the inputs."""
    module, caught = model.get_submodule(layer), []
    handle = module.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        model.encode(inputs)
    handle.remove()
    return module, caught[0].flatten(0, -3)


@pytest.mark.parametrize("variant", ["learned-penalty", "length-penalty", "gate"])
def test_a_regularised_model_with_days_is_measured_at_the_tokens_that_it_has(tmp_path: Path, variant: str) -> None:
    diagonal, residual = variant_diagonal(variant, heads=2, value=1.5, gate=0.3, learned=True)
    model = forecaster(day_of_week=True, diagonal=diagonal, residual=residual)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    path = kept_checkpoint(tmp_path / "ckpt.pt", model)
    found = run("--model", str(path), "--lengths", "6,12,24,48", "--samples", "2", "--out", str(tmp_path / "out"))
    assert found.exit_code == 0, found.stderr
    kept = Sweep.load(tmp_path / "out" / "measurement.nc")
    traffic = synthetic_city(**CITY)
    scaler = split(traffic).scaler
    for length in (6, 48):
        inputs = sequences(traffic, scaler, length, 2, 0, longest=48, day_of_week=True)
        module, tokens = recorded(model, inputs, "blocks.1.temporal")
        expected = measure(module, tokens, paths=True)
        statistics = kept.record("blocks.1.temporal", length).statistics
        assert float(statistics["sink_ratio"]) == pytest.approx(expected.sink_ratio(), rel=1e-4)
        residual_norm = float(expected.mean("residual").diagonal().mean())
        assert float(statistics["diagonal_residual"]) == pytest.approx(residual_norm, rel=1e-5)


def test_a_model_with_a_table_of_steps_says_what_stands_in_beyond_it(tmp_path: Path) -> None:
    model = STAEformer(3, dim=8, depth=1, heads=2, feed_forward=8)
    path = kept_checkpoint(tmp_path / "ckpt.pt", model)
    common = ("--model", str(path), "--samples", "2", "--out")
    longer = run(*common, str(tmp_path / "longer"), "--lengths", "6,12,24,48")
    assert longer.exit_code == 0, longer.stderr
    text = " ".join(longer.stdout.split())
    assert "table of embeddings has 12 steps: at longer inputs, all steps further back share its first" in text
    assert "1 attention layer of ckpt.pt (STAEformer)" in text
    shorter = run(*common, str(tmp_path / "shorter"), "--lengths", "3,6,9,12")
    assert "table of embeddings" not in shorter.stdout


# -- long sequences ----------------------------------------------------------------------------------------------------


def numbers(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)["layers"][0]
    return found


@pytest.mark.usefixtures("figures")
def test_statistics_without_maps_are_the_same_and_draw_no_heatmap(tmp_path: Path) -> None:
    words = ["--random", "dim=8,heads=2", "--lengths", "6,12", "--samples", "2", "--json"]
    whole = run(*words, "--out", str(tmp_path / "whole"))
    alone = run(*words, "--keep", "statistics", "--out", str(tmp_path / "alone"))
    assert numbers(alone)["sink_ratio"] == pytest.approx(numbers(whole)["sink_ratio"])
    assert numbers(alone)["paths"]["off_diagonal"] == pytest.approx(numbers(whole)["paths"]["off_diagonal"])
    files = [{file.name for file in (tmp_path / name).iterdir()} for name in ("whole", "alone")]
    assert files[0] - files[1] == {"heatmap_random.png"}
    assert json.loads(alone.stdout)["provenance"]["command"].endswith("--keep statistics")


def test_some_rows_are_named_in_the_headline_and_give_nearly_the_same(ckpt: Path, tmp_path: Path) -> None:
    words = ["--model", str(ckpt), "--lengths", "48", "--samples", "2"]
    found = run(*words, "--rows", "24", "--seed", "5", "--out", str(tmp_path / "rows"))
    assert "24 query rows of every sequence, drawn with seed 5" in found.stdout
    assert "wrote" in found.stdout
    some, whole = (Sweep.load(path / "measurement.nc") for path in (tmp_path / "rows", _whole(words, tmp_path)))
    for layer in whole.layers:
        one, other = (sweep.record(layer).statistics["sink_ratio"] for sweep in (some, whole))
        assert float(one) == pytest.approx(float(other), rel=0.1)


def _whole(words: list[str], tmp_path: Path) -> Path:
    assert run(*words, "--seed", "5", "--out", str(tmp_path / "whole")).exit_code == 0
    return tmp_path / "whole"


def test_rows_and_keep_are_settings_of_their_own(tmp_path: Path) -> None:
    words = ["--random", "dim=8,heads=2", "--lengths", "6", "--samples", "2", "--out", str(tmp_path)]
    assert run(*words, "--rows", "3").exit_code == 0
    refused(run(*words), "holds results of other settings; choose another folder with --out.")
    refused(run("--random", "dim=8,heads=2", "--rows", "0"), "--rows must be at least 1, not 0.")


def test_what_a_run_is_resumed_from_points_at_its_model(ckpt: Path, tmp_path: Path) -> None:
    state = tmp_path / "last.ckpt"
    torch.save({"format": "attention-sensitivity training state", "epoch": 1}, state)
    (tmp_path / "ckpt.pt").write_bytes(ckpt.read_bytes())
    refused(run("--model", str(state)), f"not a model; name the model beside it, {tmp_path / 'ckpt.pt'}.")
