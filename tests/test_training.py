"""Training: exact resume, the numbers against independent ones, and what is refused."""

from __future__ import annotations

import csv
import json
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from sensitivity import checkpoint
from sensitivity.errors import InputError, RunError, SensitivityWarning
from sensitivity.models import Forecaster
from sensitivity.traffic import Scaler, reopen, split, synthetic_city
from sensitivity.training import Interrupted, Result, Settings, fit
from sensitivity.training.evaluate import evaluate
from sensitivity.training.loop import choose_device, require_lightning
from sensitivity.training.module import ForecastModule

CITY = "synthetic:nodes=3,days=2"
SMALL = {"data": CITY, "epochs": 3, "dim": 4, "depth": 1, "heads": 2, "lr": 2e-3, "batch_size": 64}
DRAWS = {"variant": "dropout", "dropout_rate": 0.3}


def settings(out: Path, **others: Any) -> Settings:
    return Settings(out=str(out), **{**SMALL, **others})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """An uninterrupted run with dropout inside and outside the attention."""
    return fit(settings(tmp_path_factory.mktemp("whole") / "run", **DRAWS))


class Stop(Callback):
    """Presses Ctrl-C in the middle of an epoch."""

    def __init__(self, epoch: int, step: int) -> None:
        self.at = epoch, step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == self.at:
            raise KeyboardInterrupt


def weights(result: Result) -> torch.Tensor:
    return torch.cat([value.flatten() for value in result.model.state_dict().values()])


def log(out: Path) -> list[dict[str, str]]:
    with (out / "log.csv").open() as file:
        return list(csv.DictReader(file))


# -- what a run leaves -----------------------------------------------------------------------------------------------


def test_the_test_scores_are_those_of_the_saved_model_computed_in_numpy(run: Result) -> None:
    saved = torch.load(run.checkpoint, weights_only=True)
    model = Forecaster.from_config(saved["config"])
    model.load_state_dict(saved["weights"])
    traffic = reopen(saved["data"])
    parts = split(traffic, saved["data"]["protocol"])
    inputs = torch.stack([window.inputs for window in parts.test])
    with torch.no_grad():
        mph = Scaler.from_state(saved["scaler"]).inverse(model.eval()(inputs)).numpy().astype(np.float64)
    speed, first = traffic.speed.numpy().astype(np.float64), parts.test.first + 12
    truth = np.stack([speed[first + n : first + n + 12] for n in range(len(parts.test))])
    content = json.loads((run.checkpoint.parent / "metrics.json").read_text())
    for step in (3, 6, 12):
        p, y = mph[:, step - 1], truth[:, step - 1]
        error, y = np.abs(p - y)[y != 0], y[y != 0]
        expected = {"mae": error.mean(), "rmse": (error**2).mean() ** 0.5, "mape": 100 * (error / y).mean()}
        assert content["test"][str(step)] == pytest.approx(expected, rel=1e-5)
    assert content["test"]["average"]["mae"] == pytest.approx(np.abs(mph - truth)[truth != 0].mean(), rel=1e-5)


def test_metrics_file_is_complete_and_equals_the_result(run: Result) -> None:
    content = json.loads((run.checkpoint.parent / "metrics.json").read_text())
    assert content == run.metrics
    assert set(content["naive"]) == {"last value", "last non-zero value", "historical average"}
    assert set(content["test"]) == {"3", "6", "12", "average"} == set(content["naive"]["last value"])
    assert content["seed"] == 0
    assert content["settings"] == settings(Path("x"), **DRAWS).identity()
    assert content["data"]["kind"] == "synthetic"
    assert content["windows"]["train"] == len(run.split.train)


def test_best_epoch_is_restored_and_recorded(run: Result) -> None:
    rows = log(run.checkpoint.parent)
    errors = [float(row["validation_mae"]) for row in rows]
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert run.metrics["best_epoch"] == 1 + int(np.argmin(errors))
    whole = evaluate(run.model, run.split.scaler, run.split.validation, size=7)
    assert whole["average"]["mae"] == pytest.approx(min(errors), rel=1e-6)
    assert run.metrics["validation"]["mae"] == pytest.approx(min(errors), rel=1e-6)


def test_checkpoint_loads_as_the_same_model(run: Result) -> None:
    loaded = checkpoint.load(run.checkpoint)
    inputs = run.split.test.batch(range(5)).inputs
    assert torch.equal(loaded.model(inputs), run.model(inputs))
    assert loaded.training["best_epoch"] == run.metrics["best_epoch"]
    assert loaded.training["complete"] is True
    assert loaded.metrics["test"] == run.metrics["test"]
    assert loaded.config["diagonal"] == {"kind": "dropout", "p": 0.3, "where": "logits", "shared": False}


def test_training_lowers_the_error(run: Result) -> None:
    first, last = log(run.checkpoint.parent)[0], log(run.checkpoint.parent)[-1]
    assert float(last["train_mae"]) < float(first["train_mae"])


# -- determinism and resume ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epoch", "step"), [(0, 1), (1, 2), (2, 0)])
def test_an_interrupted_run_ends_with_the_numbers_of_the_whole_one(
    run: Result, tmp_path: Path, epoch: int, step: int
) -> None:
    out = tmp_path / "run"
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=f"sensitivity train --resume --out {out} goes on"):
        fit(settings(out, **DRAWS), callbacks=[Stop(epoch, step)])
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (out / "metrics.json").exists()
    assert (out / "log.csv").exists() == (epoch > 0)
    resumed = fit(settings(out, **DRAWS, resume=True))
    assert torch.equal(weights(resumed), weights(run))
    timing = {"windows_per_second": 0}
    assert resumed.metrics | timing == run.metrics | timing
    for ours, theirs in zip(log(out), log(run.checkpoint.parent), strict=True):
        assert ours | timing == theirs | timing


def test_a_finished_run_resumes_to_itself(run: Result) -> None:
    again = fit(settings(run.checkpoint.parent, **DRAWS, resume=True))
    assert again.metrics == run.metrics
    assert torch.equal(weights(again), weights(run))


def test_the_seed_decides(run: Result, tmp_path: Path) -> None:
    same = fit(settings(tmp_path / "same", **DRAWS))
    assert torch.equal(weights(same), weights(run))
    assert same.metrics["test"] == run.metrics["test"]
    other = fit(settings(tmp_path / "other", **DRAWS, seed=1, epochs=1))
    assert other.metrics["test"] != run.metrics["test"]


def test_the_callers_random_stream_goes_on_untouched(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    fit(settings(tmp_path / "run", epochs=1))
    assert torch.equal(torch.get_rng_state(), before)


# -- stopping --------------------------------------------------------------------------------------------------------


def test_patience_ends_the_run_and_the_best_weights_are_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, seen = iter([3.0, 2.0, 4.0, 2.5, 1.0]), []

    def scripted(self: ForecastModule) -> None:
        seen.append({name: value.clone() for name, value in self.model.state_dict().items()})
        self.log("validation_mae", next(script))

    monkeypatch.setattr(ForecastModule, "on_validation_epoch_end", scripted)
    result = fit(settings(tmp_path / "run", epochs=5, patience=2))
    assert len(seen) == 4
    assert (result.metrics["best_epoch"], result.metrics["epochs"]) == (2, 4)
    state = result.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in seen[1].items())
    assert not torch.equal(weights(result), torch.cat([value.flatten() for value in seen[3].values()]))
    again = fit(settings(tmp_path / "run", epochs=5, patience=2, resume=True))
    assert again.metrics["epochs"] == 4


class Break(Callback):
    """Makes a weight NaN at the start of an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            with torch.no_grad():
                next(pl_module.model.parameters()).fill_(float("nan"))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_epoch(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(RunError, match=r"loss became nan in epoch 2.*lower the learning rate.*epoch 1 is kept"):
        fit(settings(out), callbacks=[Break(1)])
    kept = checkpoint.load(out / "ckpt.pt")
    assert (kept.training["best_epoch"], kept.training["complete"]) == (1, False)
    assert len(log(out)) == 1
    assert fit(settings(out, resume=True)).metrics["epochs"] == 3


def test_a_loss_that_is_not_finite_in_the_first_epoch(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"in epoch 1.*no epoch was completed"):
        fit(settings(tmp_path / "run"), callbacks=[Break(0)])
    assert not (tmp_path / "run" / "ckpt.pt").exists()


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_folder_with_a_run_is_refused_and_left_alone(run: Result) -> None:
    before = {file.name: file.read_bytes() for file in run.checkpoint.parent.iterdir()}
    with pytest.raises(InputError, match=r"already holds a run \(metrics.json\); add --resume"):
        fit(settings(run.checkpoint.parent))
    assert {file.name: file.read_bytes() for file in run.checkpoint.parent.iterdir()} == before


def test_resume_needs_a_run_the_same_settings_and_the_same_data(run: Result, tmp_path: Path) -> None:
    out = run.checkpoint.parent
    with pytest.raises(InputError, match=f"no run to resume in {tmp_path}; leave out --resume"):
        fit(settings(tmp_path, resume=True))
    with pytest.raises(InputError, match="has dim=4, so it cannot be resumed with 8"):
        fit(settings(out, **DRAWS, dim=8, resume=True))
    with pytest.raises(InputError, match="began with other data"):
        fit(settings(out, **DRAWS, resume=True), traffic=synthetic_city(3, 2, seed=5))


def test_a_damaged_or_foreign_state_is_refused(run: Result, tmp_path: Path) -> None:
    for name in ("settings.json", "last.ckpt"):
        (tmp_path / name).write_bytes((run.checkpoint.parent / name).read_bytes())
    (tmp_path / "last.ckpt").write_bytes(b"PK rubbish")
    with pytest.raises(InputError, match=r"last\.ckpt is damaged"):
        fit(settings(tmp_path, **DRAWS, resume=True))
    torch.save({"weights": {}}, tmp_path / "last.ckpt")
    with pytest.raises(InputError, match="is not the state of a training run"):
        fit(settings(tmp_path, **DRAWS, resume=True))
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(InputError, match=r"settings\.json cannot be read"):
        fit(settings(tmp_path, **DRAWS, resume=True))


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"heads": 3}, "dim=4 is not divisible by heads=3"),
        ({"data": "nowhere.h5"}, "there is no file nowhere.h5"),
        ({"protocol": "other"}, "unknown protocol 'other'"),
        ({"variant": "other"}, "unknown variant 'other'"),
        ({"graph": "g.pkl"}, "the synthetic city has a graph of its own"),
        ({"data": "synthetic:streets=4"}, "the synthetic city has no argument 'streets'"),
        ({"data": "synthetic:nodes=x"}, "nodes of the synthetic city must be a number, not 'x'"),
    ],
)
def test_bad_input_leaves_no_folder(tmp_path: Path, others: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(settings(tmp_path / "run", **others))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"epochs": 0}, "epochs must be an integer of at least 1, not 0"),
        ({"depth": -2}, "depth must be an integer of at least 1, not -2"),
        ({"seed": -1}, "seed must be an integer of at least 0, not -1"),
        ({"seed": 2**63}, r"seed must be below 2\*\*63"),
        ({"lr": 0.0}, "lr must be a finite number above 0, not 0.0"),
        ({"lr": float("nan")}, "lr must be a finite number above 0, not nan"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0, not -1.0"),
        ({"device": "tpu"}, "unknown device 'tpu'; choose one of auto, cpu"),
        (
            {"variant": "sink-penalty", "sink_weight": 0.0},
            "sink-penalty with a sink weight of 0 is none; give it a positive",
        ),
    ],
)
def test_settings_out_of_range(others: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(**others)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(InputError, match="device 'cuda' was asked for, but torch finds none here"):
        choose_device("cuda")


def test_settings_of_another_version() -> None:
    with pytest.raises(InputError, match="does not know the settings speed"):
        Settings.from_identity({"speed": 3})


def test_an_out_that_cannot_be_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InputError, match=f"--out {file} is a file; name a folder"):
        fit(settings(file))
    with pytest.raises(InputError, match="is not a folder; choose another place"):
        fit(settings(file / "run"))
    assert file.read_text() == "mine"


def test_lightning_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(InputError, match=r"pip install 'attention-sensitivity\[train\]'"):
        require_lightning()


# -- silence ---------------------------------------------------------------------------------------------------------


def test_no_noise_and_nothing_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SensitivityWarning)
        fit(settings(tmp_path / "run", epochs=1))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert list((tmp_path / "cwd").iterdir()) == []
    assert {file.name for file in (tmp_path / "run").iterdir()} == {
        "settings.json", "last.ckpt", "log.csv", "ckpt.pt", "metrics.json",
    }  # fmt: skip


def test_progress_on_demand_and_a_tensorboard_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(settings(tmp_path / "run", epochs=2, tensorboard=True), progress=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "training on 387 windows of synthetic city, 3 sensors" in captured.err
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert "step" not in log(tmp_path / "run")[0]
