"""``sensitivity measure``: which checkpoints and data it takes, which it refuses, and long sequences."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from measured import CITY, forecaster, kept, refused, run

from sensitivity import checkpoint, measure
from sensitivity.models import Forecaster, STAEformer, variant_diagonal
from sensitivity.sweep import Sweep
from sensitivity.traffic import describe, sequences, split, synthetic_city, write


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

    moved, another = tmp_path / f"moved_{name}", tmp_path / "another.npz"
    (tmp_path / name).rename(moved)
    found = [run(*args, "--data", str(moved), "--out", str(tmp_path / "moved"))]
    assert json.loads(found[0].stdout)["layers"] == again["layers"]
    told = run(*args[:-1], "--data", str(moved), "--out", str(tmp_path / "told")).stdout
    assert "read as in training: key south and channel 1" in told
    np.savez(another, south=city + 1)
    told = run(*args[:-1], "--data", str(another), "--out", str(tmp_path / "another")).stdout
    assert f"the model was trained on key south and channel 1 of {name}" in told


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
    assert (
        "24 query rows of every sequence, drawn with seed 5\nthe bounds are checked on rows of their own"
        in found.stdout
    )
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
