"""``sensitivity measure``."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from measured import CITY, kept, refused, run
from rich.console import Console

from sensitivity import SoftmaxAttention, checkpoint, measure
from sensitivity.cli.measuring import table
from sensitivity.sweep import RandomTokens, Sweep, sweep
from sensitivity.traffic import sequences, split, synthetic_city


@pytest.fixture(autouse=True)
def _no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than everything else: they are drawn where a test looks at them."""
    if request.node.get_closest_marker("usefixtures") is None:
        monkeypatch.setattr("sensitivity.cli.measuring.figures.draw", lambda found, folder: [])


@pytest.fixture
def figures() -> None:
    """For ``usefixtures``: figures are drawn."""


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept(tmp_path_factory.mktemp("model") / "ckpt.pt")


@pytest.fixture(scope="module")
def done(ckpt: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("measured") / "results"
    return run("--model", str(ckpt), "--lengths", "6,12,24,48", "--samples", "3", "--out", str(out)), out


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


# -- the folder --------------------------------------------------------------------------------------------------------


def test_results_of_other_settings_are_not_overwritten(done: tuple[Result, Path], ckpt: Path, tmp_path: Path) -> None:
    _, out = done
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    refused(
        run("--model", str(ckpt), "--lengths", "6,12", "--samples", "3", "--out", str(out)),
        f"{out} holds results of other settings; choose another folder with --out.",
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    file = tmp_path / "file"
    file.write_bytes(b"x")
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
