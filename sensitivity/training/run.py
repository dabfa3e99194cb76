"""The one front door of training."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sensitivity import checkpoint
from sensitivity.errors import InputError
from sensitivity.models import Forecaster, STAEformer, variant_diagonal
from sensitivity.traffic import Split, Traffic, describe, reopen, split
from sensitivity.training.data import mixed, open_traffic
from sensitivity.training.evaluate import evaluate, naive_scores
from sensitivity.training.folder import RunFolder
from sensitivity.training.loop import choose_device, require_lightning, run_epochs
from sensitivity.training.settings import Settings

Model = Forecaster | STAEformer
_DAY = np.timedelta64(1, "D")


@dataclass(frozen=True, eq=False)
class Result:
    """A finished training.

    Attributes:
        model: with the best weights, on the CPU, in evaluation mode.
        split: what it was trained and tested on.
        metrics: the content of ``metrics.json``.
        checkpoint: path of ``ckpt.pt``.
    """

    model: Model
    split: Split
    metrics: dict[str, Any]
    checkpoint: Path


def fit(
    settings: Settings,
    *,
    traffic: Traffic | None = None,
    callbacks: Sequence[Any] = (),
    progress: bool | None = None,
) -> Result:
    """Trains a forecaster, tests its best weights, and writes the run to ``settings.out``.

    Every epoch ends with the validation error over the whole validation part; after the last epoch, or when the
    patience is at an end, the best weights are restored and tested beside the naive forecasts. An interrupted run goes
    on, with ``resume``, from its last completed epoch, and ends with the numbers of an uninterrupted one.

    Args:
        settings: everything that the result depends on.
        traffic: data that is open already, in place of ``settings.data``.
        callbacks: further Lightning callbacks.
        progress: show a progress bar; by default on a terminal only.

    Raises:
        InputError: data, settings or a folder that cannot be used; a run that is there already; Lightning is missing.
        RunError: the loss is not finite, or the disk is full.
        Interrupted: Ctrl-C; what is needed to resume is in the folder.
    """
    require_lightning()
    choose_device(settings.device)
    folder = RunFolder(settings.folder)
    traffic = _traffic(settings, folder, traffic)
    parts = split(traffic, settings.protocol, settings.input_length, settings.horizon, day_of_week=settings.day_of_week)
    with _forked_rng():
        torch.manual_seed(mixed(settings.seed, 0))
        run = _Run(settings, folder, build_model(settings, traffic), parts)
        if not settings.resume:
            folder.begin(settings, describe(traffic))
        best = run.train(callbacks, progress)
    return run.finish(best)


def build_model(settings: Settings, traffic: Traffic) -> Model:
    """A fresh forecaster for these settings and this data, with weights from the global random stream.

    Raises:
        InputError: sizes, a variant, or a spatial module that the backbone refuses.
    """
    diagonal, residual = variant_diagonal(
        settings.variant,
        p=settings.dropout_rate,
        value=settings.penalty_value,
        where=settings.where,
        shared=settings.shared,
        heads=settings.heads,
        length=settings.input_length,
        gate=settings.gate_value,
        learned=settings.gate_learned,
    )
    names = ("input_length", "horizon", "dim", "depth", "heads", "dropout", "day_of_week")
    options: dict[str, Any] = {name: getattr(settings, name) for name in names}
    options |= {"nodes": traffic.speed.shape[1], "diagonal": diagonal, "residual": residual}
    if settings.backbone == "forecaster":
        graph = traffic.graph if settings.spatial == "distance" else None
        return Forecaster(**options, spatial=settings.spatial, graph=graph)
    if settings.spatial != "attention":
        raise InputError(
            f"a staeformer mixes its nodes by attention, so spatial={settings.spatial!r} has no meaning there; leave "
            "it out."
        )
    return STAEformer(**options, steps_per_day=max(1, round(_DAY / traffic.step)))


def _traffic(settings: Settings, folder: RunFolder, traffic: Traffic | None) -> Traffic:
    """The run's data; a resumed run gets exactly the data that it began with."""
    if not settings.resume:
        folder.refuse_existing()
        return open_traffic(settings.data, settings.graph) if traffic is None else traffic
    folder.check_same(settings)
    _, description = folder.read_settings()
    if traffic is None:
        return reopen(description)
    if describe(traffic) != description:
        source = description.get("source")
        raise InputError(f"the run in {folder.path} began with other data ({source}); resume it with that data.")
    return traffic


@dataclass(frozen=True, eq=False)
class _Run:
    """A run between its beginning and its end."""

    settings: Settings
    folder: RunFolder
    model: Model
    parts: Split

    def train(self, callbacks: Sequence[Any], progress: bool | None) -> dict[str, Any]:
        """Trains to the end; returns the best epoch with its weights, and the history."""
        from sensitivity.training.callbacks import Keeper, progress_bar
        from sensitivity.training.module import ForecastModule

        settings, optimizer = self.settings, None
        state = self.folder.read_state() if settings.resume else None
        keeper = Keeper(self.folder, settings.patience, state, self._save_best)
        if state is not None:
            self.model.load_state_dict(state["weights"])
            optimizer = state["optimizer"]
        done = len(keeper.history)
        if done < settings.epochs and not keeper.exhausted:
            steps = -(-len(self.parts.train) // settings.batch_size)
            module = ForecastModule(self.model, self.parts.scaler, settings, steps, optimizer)
            bar = progress_bar(self.title(), keeper, settings.epochs, steps, progress)
            run_epochs(settings, module, self.parts, [*callbacks, *bar, keeper], done)
        return {**keeper.best, "history": keeper.history}

    def finish(self, best: dict[str, Any]) -> Result:
        """Restores the best weights, tests them, and writes the scores."""
        device = choose_device(self.settings.device)
        self.model.load_state_dict(best["weights"])
        self.model.to(device).eval()
        test = evaluate(self.model, self.parts.scaler, self.parts.test.to(device))
        self.model.cpu()
        speeds = [row["windows_per_second"] for row in best["history"]]
        metrics = {
            "test": test,
            "naive": naive_scores(self.parts),
            "validation": {"mae": best["mae"]},
            "best_epoch": best["epoch"],
            "epochs": len(best["history"]),
            "seed": self.settings.seed,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "windows": {name: len(getattr(self.parts, name)) for name in ("train", "validation", "test")},
            "windows_per_second": statistics.median(speeds),
            "settings": self.settings.identity(),
            "data": self.data(),
        }
        scores = {name: metrics[name] for name in ("test", "naive", "validation")}
        self._save(scores, {"best_epoch": best["epoch"], "epochs": len(best["history"]), "complete": True})
        self.folder.write_metrics(metrics)
        return Result(self.model, self.parts, metrics, self.folder.checkpoint)

    def data(self) -> dict[str, Any]:
        """What the model was trained on: the traffic's description and how it was split."""
        names = ("protocol", "input_length", "horizon")
        return describe(self.parts.traffic) | {name: getattr(self.settings, name) for name in names}

    def title(self) -> str:
        """What is going on, in one line."""
        nodes = self.parts.traffic.speed.shape[1]
        return f"training on {len(self.parts.train)} windows of {self.parts.traffic.name}, {nodes} sensors"

    def _save_best(self, epoch: int, mae: float) -> None:
        self._save({"validation": {"mae": mae}}, {"best_epoch": epoch, "complete": False})

    def _save(self, metrics: dict[str, Any], more: dict[str, Any]) -> None:
        checkpoint.save(
            self.folder.checkpoint,
            self.model,
            scaler=self.parts.scaler,
            data=self.data(),
            metrics=metrics,
            training=self.settings.identity() | more,
        )


@contextmanager
def _forked_rng() -> Iterator[None]:
    """The caller's random streams are as before, whatever happens inside."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
