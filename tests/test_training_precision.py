"""Arithmetic of a training: bfloat16 for the network, and the published quirks, each against its own computation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sensitivity.errors import InputError
from sensitivity.models import VARIANTS, Forecaster, variant_diagonal
from sensitivity.traffic import Scaler, Split, Traffic, Window, split, synthetic_city
from sensitivity.training import Result, Settings, fit
from sensitivity.training.evaluate import evaluate
from sensitivity.training.module import ForecastModule

SMALL = {"epochs": 3, "dim": 4, "depth": 1, "heads": 2, "lr": 2e-3, "batch_size": 64}


@pytest.fixture(scope="module")
def city() -> Traffic:
    return synthetic_city(3, 2, missing=0.3)


@pytest.fixture(scope="module")
def parts(city: Traffic) -> Split:
    return split(city)


def settings(**others: Any) -> Settings:
    return Settings(data="synthetic:nodes=3,days=2,missing=0.3", **{**SMALL, **others})


def module(parts: Split, **others: Any) -> ForecastModule:
    torch.manual_seed(0)
    return ForecastModule(Forecaster(3, dim=4, depth=1, heads=2, dropout=0.0), parts.scaler, settings(**others), 8)


def dtypes_of(module: ForecastModule, batch: Window) -> set[torch.dtype]:
    """The types that the linear layers of the network put out."""
    seen = set()
    for part in module.model.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    module(batch.inputs)
    return seen


# -- bfloat16 --------------------------------------------------------------------------------------------------------


def test_the_network_trains_in_bfloat16_and_is_scored_in_float32(parts: Split) -> None:
    batch = parts.train.batch(range(20))
    assert dtypes_of(module(parts, precision="bf16"), batch) == {torch.bfloat16}
    assert dtypes_of(module(parts, precision="bf16").eval(), batch) == {torch.float32}
    assert dtypes_of(module(parts), batch) == {torch.float32}


def test_the_loss_stays_in_float32(parts: Split) -> None:
    half = module(parts, precision="bf16")
    batch = parts.train.batch(range(20))
    with torch.autocast("cpu", torch.bfloat16):
        scaled = half.model(batch.inputs)
    mph = parts.scaler.inverse(scaled.float())
    expected = (mph - batch.target).abs()[batch.mask].mean()
    loss = half.training_step(batch, 0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    assert loss != module(parts).training_step(batch, 0)
    loss.backward()
    assert {p.grad.dtype for p in half.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("spatial", ["as_published", "adaptive", "none"])
def test_every_variant_runs_in_bfloat16_close_to_float32(parts: Split, variant: str, spatial: str) -> None:
    diagonal, residual = variant_diagonal(variant, heads=2)
    torch.manual_seed(0)
    model = Forecaster(3, dim=8, depth=2, heads=2, dropout=0.0, spatial=spatial, diagonal=diagonal, residual=residual)
    inputs = parts.train.batch(range(8)).inputs
    exact = model.eval()(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(inputs)
        model.train()(inputs).float().sum().backward()
    torch.testing.assert_close(half.float(), exact, rtol=0.1, atol=0.1)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_a_run_in_bfloat16_says_so_and_its_scores_are_those_of_float32(tmp_path: Path, city: Traffic) -> None:
    result = fit(settings(out=str(tmp_path / "run"), precision="bf16"), traffic=city)
    assert result.metrics["precision"] == {"training": "bf16", "evaluation": "32"}
    assert result.metrics["quirks"] == {}
    assert result.metrics["test"] == evaluate(result.model, result.split.scaler, result.split.test)
    other = fit(settings(out=str(tmp_path / "other")), traffic=city)
    assert other.metrics["precision"] == {"training": "32", "evaluation": "32"}
    assert result.metrics["test"] != other.metrics["test"]
    assert result.metrics["test"]["average"]["mae"] == pytest.approx(other.metrics["test"]["average"]["mae"], rel=0.02)


def test_bfloat16_resumes_exactly(tmp_path: Path, city: Traffic) -> None:
    whole = fit(settings(out=str(tmp_path / "whole"), precision="bf16"), traffic=city)
    fit_and_forget(tmp_path / "part", city, precision="bf16")
    resumed = fit(settings(out=str(tmp_path / "part"), precision="bf16", resume=True), traffic=city)
    assert resumed.metrics["test"] == whole.metrics["test"]


def fit_and_forget(out: Path, city: Traffic, **others: Any) -> None:
    """A run that was stopped in its second epoch."""
    from lightning.pytorch.callbacks import Callback

    from sensitivity.training import Interrupted

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 1:
                raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        fit(settings(out=str(out), **others), traffic=city, callbacks=[Stop()])


# -- as published ----------------------------------------------------------------------------------------------------


PUBLISHED = {"as_published": True, "variant": "dropout", "lr": 0.03, "epochs": 4, "batch_size": 16}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, city: Traffic) -> Result:
    """A run whose best epoch is not its last, with a learning rate that is too high."""
    out = tmp_path_factory.mktemp("published") / "run"
    return fit(settings(out=str(out), **PUBLISHED), traffic=city)


def test_one_flag_sets_what_settings_can_say() -> None:
    told = settings(as_published=True)
    assert (told.precision, told.where, told.shared) == ("bf16", "logits", True)
    assert (told.evaluation_precision, settings(precision="bf16").evaluation_precision) == ("bf16", "32")
    assert settings().quirks() == {}
    assert set(told.quirks()) == {"loss", "tested weights", "validation error", "scaler", "diagonal dropout"}
    with pytest.raises(InputError, match=r"as_published drops diagonal logits, .* but where='weights'"):
        settings(as_published=True, where="weights")
    assert Settings.from_identity(told.identity()) == dataclasses.replace(told, out="runs/train")


def test_the_published_loss_is_rounded_to_bfloat16(parts: Split) -> None:
    quirky, batch = module(parts, as_published=True), parts.train.batch(range(20))
    with torch.autocast("cpu", torch.bfloat16):
        scaled = quirky.model(batch.inputs)
    rounded = parts.scaler.inverse(scaled.float()).bfloat16()
    error = (rounded - batch.target.bfloat16()).abs()
    assert error.dtype == torch.bfloat16
    loss = quirky.training_step(batch, 0)
    assert loss.dtype == torch.bfloat16
    assert loss == error[batch.mask].double().mean().bfloat16()


def test_the_scaler_counts_missing_readings_as_zeros(published: Result, city: Traffic) -> None:
    rows = 12 - 1 + len(published.split.train)
    values = city.speed[:rows].double()
    assert float((values == 0).double().mean()) > 0.1
    scaler = published.split.scaler
    assert float(scaler.mean) == pytest.approx(float(values.mean()), rel=1e-6)
    assert float(scaler.std) == pytest.approx(float(values.std(unbiased=False)), rel=1e-6)
    assert float(split(city).scaler.mean) > float(scaler.mean) + 1


def test_the_last_weights_are_tested_and_not_the_best(published: Result) -> None:
    metrics = published.metrics
    assert metrics["best_epoch"] < metrics["tested_epoch"] == metrics["epochs"] == 4
    last = torch.load(published.checkpoint.parent / "last.ckpt", weights_only=True)
    state = published.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in last["weights"].items())
    saved = torch.load(published.checkpoint, weights_only=True)
    assert all(torch.equal(saved["weights"][name], value) for name, value in last["weights"].items())
    assert saved["training"]["tested_epoch"] == 4
    assert not all(torch.equal(state[name], value) for name, value in last["best"]["weights"].items())


def test_scores_are_computed_in_bfloat16_and_recorded(published: Result) -> None:
    metrics = published.metrics
    assert metrics["precision"] == {"training": "bf16", "evaluation": "bf16"}
    assert metrics["quirks"] == settings(as_published=True).quirks()
    assert metrics["settings"]["as_published"] is True
    half, exact = (evaluate(published.model, published.split.scaler, published.split.test, precision=p) for p in
                   ("bf16", "32"))  # fmt: skip
    assert metrics["test"] == half != exact


def test_the_validation_error_is_a_mean_over_batches(published: Result) -> None:
    """In numpy, with the last model; batches are those of training, the last one smaller."""
    windows, scaler = published.split.validation, published.split.scaler
    means, sums, count = [], 0.0, 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for window in windows.batches(16):
            mph = Scaler.inverse(scaler, published.model.eval()(window.inputs).float()).bfloat16()
            error = (mph - window.target.bfloat16()).abs().float().numpy()[window.mask.numpy()]
            means.append(error.astype(np.float64).mean())
            sums, count = sums + error.sum(), count + error.size
    last = torch.load(published.checkpoint.parent / "last.ckpt", weights_only=True)["history"][-1]
    assert len(windows) % 16
    assert last["validation_mae"] == pytest.approx(np.mean(means), rel=1e-5)
    assert last["validation_mae"] != pytest.approx(sums / count, rel=1e-4)


def test_a_finished_published_run_resumes_to_itself(published: Result, city: Traffic) -> None:
    out = str(published.checkpoint.parent)
    again = fit(settings(out=out, **PUBLISHED, resume=True), traffic=city)
    assert again.metrics == published.metrics


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"precision": "16"}, "unknown precision '16'; choose one of 32, bf16"),
        ({"devices": 0}, "devices must be an integer of at least 1, not 0"),
        ({"diagnose_every": -1}, "diagnose_every must be an integer of at least 0, not -1"),
    ],
)
def test_settings_out_of_range(others: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(**others)
