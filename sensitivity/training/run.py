"""The one front door of training."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from sensitivity import checkpoint
from sensitivity.errors import InputError, RunError
from sensitivity.models import Forecaster, STAEformer, variant_diagonal
from sensitivity.traffic import Split, Traffic, describe, reopen, split
from sensitivity.training.data import mixed, open_settings
from sensitivity.training.evaluate import evaluate, naive_scores
from sensitivity.training.folder import RunFolder
from sensitivity.training.loop import Interrupted, choose_device, require_lightning, run_epochs
from sensitivity.training.ranks import check_devices, rank
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
    check_devices(choose_device(settings.device), settings.devices)
    folder = RunFolder(settings.folder)
    first = rank(settings.devices) == 0
    traffic = _traffic(settings, folder, traffic, new=first and not settings.resume)
    parts = _split(settings, traffic)
    with _forked_rng():
        torch.manual_seed(mixed(settings.seed, 0))
        run = _Run(settings, folder, build_model(settings, traffic), parts)
        if not first:
            _accompany(run)
        if not settings.resume:
            folder.begin(settings, describe(traffic))
        trained = run.train(callbacks, progress)
    return run.finish(trained)


def _accompany(run: _Run) -> NoReturn:
    """The training as another rank than the first sees it: it ends with the last epoch, and what fails is said once."""
    try:
        run.train((), progress=False)
    except (RunError, Interrupted):
        raise SystemExit(1) from None
    raise SystemExit(0)


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
        if settings.spatial == "distance" and graph is None:
            raise InputError(
                f"spatial='distance' needs the road graph, but {traffic.name} has none; name its file with --graph "
                "(graph= in Python), or choose 'adaptive'."
            )
        return Forecaster(**options, spatial=settings.spatial, graph=graph)
    if settings.spatial != "attention":
        raise InputError(
            f"a staeformer mixes its nodes by attention, so spatial={settings.spatial!r} has no meaning there; leave "
            "it out."
        )
    return STAEformer(**options, steps_per_day=max(1, round(_DAY / traffic.step)))


def _split(settings: Settings, traffic: Traffic) -> Split:
    return split(
        traffic,
        settings.protocol,
        settings.input_length,
        settings.horizon,
        day_of_week=settings.day_of_week,
        zeros=True if settings.as_published else None,
    )


def _traffic(settings: Settings, folder: RunFolder, traffic: Traffic | None, new: bool) -> Traffic:
    """The run's data; a resumed run gets exactly the data that it began with."""
    if new:
        folder.refuse_existing()
    if not settings.resume:
        return open_settings(settings) if traffic is None else traffic
    folder.check_same(settings)
    _, description = folder.read_settings()
    if traffic is None:
        return reopen(description)
    if describe(traffic) != description:
        source = description.get("source")
        raise InputError(f"the run in {folder.path} began with other data ({source}); resume it with that data.")
    return traffic


@dataclass(frozen=True, eq=False)
class _Trained:
    """What a training leaves: the weights to test and their epoch, the best epoch and its error, and all epochs."""

    weights: dict[str, Tensor]
    tested: int
    best: int
    mae: float
    history: list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class _Run:
    """A run between its beginning and its end."""

    settings: Settings
    folder: RunFolder
    model: Model
    parts: Split

    def train(self, callbacks: Sequence[Any], progress: bool | None) -> _Trained:
        """Trains to the end; returns the epochs, and the weights that are to be tested."""
        from sensitivity.training.callbacks import Keeper, copied, progress_bar
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
            run_epochs(settings, module, self.parts, [*callbacks, *self._diagnosis(), *bar, keeper], done)
        best, last = keeper.best, len(keeper.history)
        if settings.as_published:
            return _Trained(copied(self.model), last, best["epoch"], best["mae"], keeper.history)
        return _Trained(best["weights"], best["epoch"], best["epoch"], best["mae"], keeper.history)

    def finish(self, trained: _Trained) -> Result:
        """Restores the weights that are to be tested, tests them, and writes the scores."""
        device, settings = choose_device(self.settings.device), self.settings
        self.model.load_state_dict(trained.weights)
        self.model.to(device).eval()
        precision = settings.evaluation_precision
        test = evaluate(self.model, self.parts.scaler, self.parts.test.to(device), precision=precision)
        self.model.cpu()
        epochs = {"best_epoch": trained.best, "tested_epoch": trained.tested, "epochs": len(trained.history)}
        metrics = {
            "test": test,
            "naive": naive_scores(self.parts),
            "validation": {"mae": trained.mae},
            **epochs,
            "precision": {"training": settings.precision, "evaluation": precision},
            "quirks": settings.quirks(),
            "seed": settings.seed,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "windows": {name: len(getattr(self.parts, name)) for name in ("train", "validation", "test")},
            "windows_per_second": statistics.median(row["windows_per_second"] for row in trained.history),
            "settings": settings.identity(),
            "data": self.data(),
        }
        scores = {name: metrics[name] for name in ("test", "naive", "validation")}
        self._save(scores, epochs | {"complete": True})
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

    def _diagnosis(self) -> list[Any]:
        """The look at the attention layers, if it is wanted."""
        from sensitivity.training.diagnostics import SensitivityCallback

        every = self.settings.diagnose_every
        return [SensitivityCallback(every, path=self.folder.diagnostics)] if every else []

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
