"""The forecaster as Lightning sees it. This module needs Lightning; import it only when a training starts."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from sensitivity.errors import RunError, SensitivityWarning
from sensitivity.traffic import Scaler, Window
from sensitivity.training.data import mixed
from sensitivity.training.metrics import MaskedMetrics
from sensitivity.training.precision import autocast
from sensitivity.training.ranks import summed, world
from sensitivity.training.schedule import rate_of
from sensitivity.training.settings import Settings
from sensitivity.training.sink import SinkPenalty

CHECK_EVERY = 50
"""Steps between two looks at the loss on a device that works ahead of the host."""


class ForecastModule(LightningModule):
    """Masked mean absolute error in mph on de-normalised forecasts.

    Nothing of a step is read by the host: sums stay on the device until the epoch ends. All randomness of an epoch is a
    function of the seed and the epoch's number.

    Args:
        model: maps inputs ``(batch, time, node, channel)`` to z-scores ``(batch, horizon, node)``.
        scaler: from z-scores to mph.
        settings: of the run.
        steps: training steps in an epoch.
        optimizer_state: of an earlier part of the run.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: nn.Module,
        scaler: Scaler,
        settings: Settings,
        steps: int,
        optimizer_state: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.settings, self.steps = model, settings, steps
        self.register_buffer("mean", scaler.mean, persistent=False)
        self.register_buffer("std", scaler.std, persistent=False)
        self.windows_per_second = 0.0
        self.sink = SinkPenalty(model, settings.sink_weight, settings.sink_sequences) if settings.sink_weight else None
        self._optimizer_state = optimizer_state
        self._scores = MaskedMetrics()
        self._seen = torch.zeros(4)
        self._batches: list[Tensor] = []
        self._started = 0.0
        self._train_mae = 0.0

    def forward(self, inputs: Float[Tensor, "batch time node channel"]) -> Float[Tensor, "batch horizon node"]:
        """The forecast in mph."""
        precision = self.settings.precision if self.training else self.settings.evaluation_precision
        with autocast(self.device.type, precision):
            scaled = self.model(inputs)
        return scaled.float() * self.std + self.mean

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The recipe's optimiser, fused where torch can; a resumed run goes on with the moments it had."""
        kind = torch.optim.Adam if self.settings.recipe == "steps" else torch.optim.AdamW
        optimizer = kind(
            self.parameters(),
            lr=self.settings.lr,
            weight_decay=self.settings.weight_decay,
            fused=self.device.type in ("cpu", "cuda"),
        )
        if self._optimizer_state is not None:
            optimizer.load_state_dict(self._optimizer_state)
        return optimizer

    def on_train_epoch_start(self) -> None:
        """Seeds the epoch and starts its sums."""
        own = (self.global_rank,) if self.global_rank else ()
        torch.manual_seed(mixed(self.settings.seed, self.current_epoch, 2, *own))
        self._seen = torch.zeros(4, device=self.device)
        self._started = time.perf_counter()

    def on_train_batch_start(self, batch: Window, batch_idx: int) -> None:
        """Sets the learning rate of the step."""
        settings, done = self.settings, self.current_epoch + batch_idx / self.steps
        rate = rate_of(settings.recipe, done, settings.epochs, settings.lr)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = rate

    def training_step(self, batch: Window, batch_idx: int) -> Tensor:
        """The loss of a batch; exactly 0, with a graph, where no target is valid.

        Raises:
            RunError: the loss is not finite.
        """
        with nullcontext() if self.sink is None else self.sink.recording():
            error, count = self._errors(batch)
        here = torch.stack([error.detach(), count, torch.full_like(count, len(batch.inputs))])
        sums = summed(here)
        loss = error / sums[1].clamp_min(1)
        if world() > 1:  # the gradients of the ranks are averaged, but it is their sum that belongs to the whole batch
            loss = loss * world()
        loss = loss if self.sink is None else loss + self.sink()
        self._seen += torch.cat([sums, (sums[1:2] == 0).float()])
        if self.device.type == "cpu" or batch_idx % CHECK_EVERY == CHECK_EVERY - 1:
            self._check_loss(sums[0] / sums[1].clamp_min(1))
        return loss.bfloat16() if self.settings.as_published else loss

    def on_validation_start(self) -> None:
        """Closes the sums of the training epoch before validation begins.

        Raises:
            RunError: the epoch's loss is not finite, or it had no valid target.
        """
        error, count, windows, empty = self._seen.tolist()
        self.windows_per_second = windows / max(time.perf_counter() - self._started, 1e-9)
        self._check_loss(torch.tensor(error))
        if count == 0:
            raise RunError(f"no batch of epoch {self.current_epoch + 1} has a valid target: all readings are missing.")
        if empty and self.global_rank == 0:
            text = f"{empty:.0f} of {self.steps} batches had no valid target in epoch {self.current_epoch + 1}."
            warnings.warn(text, SensitivityWarning, stacklevel=2)
        self._scores, self._batches = MaskedMetrics(), []
        self._train_mae = error / count

    def validation_step(self, batch: Window, batch_idx: int) -> None:
        """Adds a batch to the sums over the whole validation part."""
        prediction = self(batch.inputs)
        self._scores.update(prediction, batch.target, batch.mask)
        if self.settings.as_published:
            self._batches.append(torch.stack(masked_errors(prediction.bfloat16(), batch)))

    def on_validation_epoch_end(self) -> None:
        """Logs the epoch: errors over all horizons, in mph, and the learning rate at its end."""
        self._scores.reduce()
        average = self._scores.compute()["average"]
        if self.settings.as_published:  # the mean over batches, however few readings one of them has
            error, count = summed(torch.stack(self._batches)).T
            average = average | {"mae": float((error / count)[count > 0].mean())}
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        values: dict[str, Any] = {"train_mae": self._train_mae}
        values |= {f"validation_{name}": average[name] for name in ("mae", "rmse")} | {"learning_rate": rate}
        if self.sink is not None:
            values["train_log_sink_ratio"] = self.sink.mean()
        if self.trainer.loggers:  # the x axis of loggers is the epoch, before and after an interruption
            values["step"] = float(self.current_epoch + 1)
        self.log_dict(values)

    def _errors(self, batch: Window) -> tuple[Tensor, Tensor]:
        """Sum of the absolute errors of a batch, and how many readings it has."""
        prediction = self(batch.inputs)
        return masked_errors(prediction.bfloat16() if self.settings.as_published else prediction, batch)

    def _check_loss(self, loss: Tensor) -> None:
        if not torch.isfinite(loss):
            kept = self.current_epoch
            way = f"epoch {kept} is kept" if kept else "no epoch was completed"
            raise RunError(
                f"the training loss became {float(loss)} in epoch {kept + 1}: the training has diverged; lower the "
                f"learning rate (now at most {self.settings.lr:g}); {way} in {self.settings.out}."
            )


def masked_errors(prediction: Tensor, batch: Window) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Sum of the absolute errors over valid readings in the prediction's precision, added up in float32; their count.

    Masked differences are set to zero before abs, so that no masked value can reach a gradient.
    """
    error = torch.where(batch.mask, prediction - batch.target.to(prediction.dtype), 0.0).abs()
    return error.float().sum(), batch.mask.sum().float()
