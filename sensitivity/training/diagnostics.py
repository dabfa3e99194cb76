"""Watching the attention layers while they are trained. This module needs Lightning."""

from __future__ import annotations

import csv
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from sensitivity.diagnosis import SAMPLES, diagnose
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.files import write_text
from sensitivity.training.folder import csv_text

SHARE = 0.05
_NOTICED = 0.5


class SensitivityCallback(Callback):
    """Logs, for every attention layer, what :func:`sensitivity.diagnose` finds at the first validation batch.

    The statistics go to Lightning's loggers as ``LAYER/STATISTIC``, against the epoch, and to a CSV file of one line
    for each epoch and layer. The training is bit by bit the same with and without the callback. What a look costs is
    written in the column ``share_of_epoch``; a warning says so where it exceeds a twentieth of the epoch.

    Args:
        every: epochs between two looks; the first one is after epoch ``every``.
        layers: names of attention layers inside the model; all by default.
        samples: sequences per layer that are measured.
        path: of the CSV file; none by default. A resumed training goes on with the file.
        inputs: takes the model's inputs out of a batch; by default the batch itself where it is a tensor, else its
            first member.

    The model is ``module.model`` where the Lightning module has such a submodule, else the module itself.

    Raises:
        InputError: ``every`` or ``samples`` below 1; what :func:`sensitivity.diagnose` refuses.
    """

    def __init__(
        self,
        every: int = 1,
        layers: Sequence[str] | None = None,
        samples: int = SAMPLES,
        *,
        path: str | os.PathLike[str] | None = None,
        inputs: Callable[[Any], Any] | None = None,
    ) -> None:
        for name, value in (("every", every), ("samples", samples)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be an integer of at least 1, not {value!r}.")
        self.every, self.layers, self.samples = every, layers, samples
        self.path = None if path is None else Path(path)
        self.inputs = _first if inputs is None else inputs
        self.rows: list[dict[str, Any]] = []
        self._batch: Any = None
        self._began = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes up the file of an earlier part of the training."""
        self.rows = []
        if self.path is not None and self.path.exists():
            with self.path.open(encoding="utf-8", newline="") as file:
                self.rows = [row for row in csv.DictReader(file) if int(row["epoch"]) <= trainer.current_epoch]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes when the epoch began."""
        self._began = time.perf_counter()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keeps the inputs of the first batch, as many as are needed for the samples."""
        if batch_idx == 0 and dataloader_idx == 0:
            inputs = self.inputs(batch)
            self._batch = inputs[: self.samples] if isinstance(inputs, Tensor) else inputs

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at the layers, after every so many epochs; on the first rank only."""
        epoch = trainer.current_epoch + 1
        if epoch % self.every or self._batch is None or not trainer.is_global_zero:
            return
        began = time.perf_counter()
        model = getattr(pl_module, "model", None)
        model = model if isinstance(model, nn.Module) else pl_module
        found = diagnose(model, self._batch, layers=self.layers, samples=self.samples)
        seconds = time.perf_counter() - began
        self._keep(trainer, epoch, found, seconds, seconds / max(began - self._began, 1e-9))

    def _keep(
        self, trainer: Trainer, epoch: int, found: dict[str, dict[str, float]], seconds: float, share: float
    ) -> None:
        cost = {"seconds": round(seconds, 4), "share_of_epoch": round(share, 5)}
        self.rows += [{"epoch": epoch, "layer": name, **values, **cost} for name, values in found.items()]
        if self.path is not None:
            write_text(self.path, csv_text(self.rows))
        flat = {f"{name}/{key}": value for name, values in found.items() for key, value in values.items()}
        for logger in trainer.loggers:
            logger.log_metrics(flat, step=epoch)
        if share > SHARE and seconds > _NOTICED:
            text = (
                f"looking at the attention layers took {seconds:.1f} s, {share:.0%} of epoch {epoch}; raise every="
                f"{self.every} or lower samples={self.samples}."
            )
            warnings.warn(text, SensitivityWarning, stacklevel=2)


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) else batch
