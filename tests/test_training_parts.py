"""The parts of training alone: windows, loss, learning rate, data and folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from sensitivity.errors import RunError, SensitivityWarning
from sensitivity.models import Forecaster
from sensitivity.traffic import Split, Traffic, Window, split, synthetic_city
from sensitivity.training import Settings, fit
from sensitivity.training.data import WindowLoader, open_traffic
from sensitivity.training.folder import RunFolder
from sensitivity.training.metrics import masked_mae
from sensitivity.training.module import ForecastModule
from sensitivity.training.schedule import learning_rate, warm_up

SMALL = {"data": "synthetic:nodes=3,days=2", "dim": 4, "depth": 1, "heads": 2, "lr": 2e-3, "batch_size": 64}


def settings(out: Path, **others: Any) -> Settings:
    return Settings(out=str(out), **{**SMALL, **others})


@pytest.fixture(scope="module")
def parts() -> Split:
    return split(synthetic_city(3, 2))


def test_loader_gives_every_window_once_in_an_order_of_seed_and_epoch(parts: Split) -> None:
    def order(seed: int | None, epoch: int) -> list[float]:
        loader = WindowLoader(parts.train, 50, seed, epoch=lambda: epoch)
        batches = list(loader)
        assert [len(batch.inputs) for batch in batches] == [50] * 7 + [37]
        assert len(loader) == 8
        return torch.cat([batch.inputs[:, 0, 0, 1] for batch in batches]).tolist()

    plain = order(None, 0)
    assert plain == [float(window.inputs[0, 0, 1]) for window in parts.train]
    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert sorted(order(0, 3)) == sorted(plain)


def module_of(parts: Split, **others: Any) -> ForecastModule:
    return ForecastModule(Forecaster(3, dim=4, depth=1, heads=2), parts.scaler, settings(Path("x"), **others), 8)


def test_the_loss_is_the_masked_error_in_mph(parts: Split) -> None:
    module = module_of(parts, dropout=0.0).eval()
    batch = parts.train.batch(range(20))
    mph = parts.scaler.inverse(module.model(batch.inputs))
    expected = (mph - batch.target).abs()[batch.mask].mean()
    torch.testing.assert_close(module.training_step(batch, 0), expected)
    torch.testing.assert_close(module.training_step(batch, 0), masked_mae(mph, batch.target, batch.mask))


def test_a_batch_without_a_valid_target_teaches_nothing_and_is_told(parts: Split) -> None:
    module = module_of(parts)
    batch = parts.train.batch(range(4))
    empty = Window(batch.inputs, torch.full_like(batch.target, float("nan")), torch.zeros_like(batch.mask))
    loss = module.training_step(empty, 0)
    loss.backward()
    assert loss.item() == 0
    assert all((p.grad is None) or (p.grad == 0).all() for p in module.model.parameters())
    with pytest.raises(RunError, match="no batch of epoch 1 has a valid target"):
        module.on_validation_start()
    module.training_step(batch, 1)
    with pytest.warns(SensitivityWarning, match="1 of 8 batches had no valid target in epoch 1"):
        module.on_validation_start()


def test_learning_rate_rises_and_falls_as_published() -> None:
    rates = [learning_rate(epoch, 150, 2e-4) for epoch in range(151)]
    assert rates[0] == pytest.approx(2e-5)
    assert rates[5] == max(rates) == 2e-4
    assert np.allclose(np.diff(rates[:6]), 1.8e-4 / 5)
    assert rates[150] == pytest.approx(1e-6)
    assert all(np.diff(rates[5:]) < 0)
    middle = 5 + 145 / 2
    assert learning_rate(middle, 150, 2e-4) == pytest.approx((2e-4 + 1e-6) / 2)
    assert warm_up(1) == 0.1
    assert learning_rate(1, 1, 1e-7) == 1e-7


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_the_schedule_is_followed_step_by_step(tmp_path: Path) -> None:
    seen = Rates()
    fit(settings(tmp_path / "run", epochs=2), callbacks=[seen])
    steps = len(seen.rates) // 2
    expected = [learning_rate(step / steps, 2, 2e-3) for step in range(2 * steps)]
    assert seen.rates == pytest.approx(expected, rel=1e-12)


def test_open_traffic(tmp_path: Path) -> None:
    traffic = open_traffic("synthetic:nodes=4,days=2,missing=0.2")
    assert isinstance(traffic, Traffic)
    assert traffic.origin["arguments"]["missing"] == 0.2
    assert traffic.speed.shape == (576, 4)
    assert open_traffic("synthetic").speed.shape == synthetic_city().speed.shape


def test_a_full_disk_leaves_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.write_state({"epoch": 1, "history": []})

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match="the disk is full"):
        folder.write_state({"epoch": 2, "history": []})
    assert folder.read_state()["epoch"] == 1
