"""Errors over valid readings only: one metric for training, validation, test and the naive forecasts.

With p the prediction, y the raw speed and M = 1 where y is a valid reading,

    MAE = sum M |p - y| / sum M,   RMSE = sqrt(sum M (p - y)^2 / sum M),   MAPE = 100 sum M |p - y| / y / sum M,

over a whole data set at once, at single horizons and over all horizons together. MAPE leaves out, in both its sums,
readings below a floor.
"""

from __future__ import annotations

import warnings

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.errors import InputError, RunError, SensitivityWarning
from sensitivity.traffic import Windows
from sensitivity.training.ranks import summed

HORIZONS = (3, 6, 12)
"""Steps that are reported on their own, counted from 1: 15, 30 and 60 minutes of METR-LA."""
FLOOR = 1.0
"""Readings below this many mph are left out of MAPE, and counted."""

Scores = dict[str, dict[str, float | None]]


class MaskedMetrics:
    """Adds up errors batch by batch; the result does not depend on how the data was cut into batches.

    Sums and counts are kept in float64 for every horizon step. The entry ``average`` is over all steps together.

    Attributes:
        floor: readings below this many mph count in MAE and RMSE, but not in MAPE.
        horizons: steps that are reported on their own.
    """

    def __init__(self, floor: float | int = FLOOR, horizons: tuple[int, ...] = HORIZONS) -> None:
        if not floor > 0:
            raise InputError(f"the floor of MAPE must be above 0 mph, not {floor!r}.")
        self.floor = floor
        self.horizons = horizons
        self._sums: Float[Tensor, "horizon 5"] | None = None

    def update(
        self,
        prediction: Float[Tensor, "..."],
        target: Float[Tensor, "..."],
        mask: Bool[Tensor, "..."],
    ) -> None:
        """Adds a batch; all three ``(..., horizon, node)``.

        Args:
            prediction: mph.
            target: raw speeds in mph; whatever stands at masked entries is ignored.
            mask: True where the target is a valid reading.

        Raises:
            InputError: shapes that differ.
            RunError: a prediction that counts is not finite.
        """
        check_shapes(prediction, target, mask)
        device = "cpu" if prediction.device.type == "mps" else prediction.device  # mps has no float64
        p, y, valid = prediction.detach().to(device), target.to(device), mask.to(device)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        error = torch.where(valid, p.double() - y.double(), zero).abs()
        if not torch.isfinite(error).all():
            raise RunError(
                f"{int((~torch.isfinite(error)).sum())} of {int(valid.sum())} scored predictions are not finite; "
                "the training has diverged: lower the learning rate."
            )
        rated = valid & (y >= self.floor)
        relative = torch.where(rated, error / y.double().clamp_min(self.floor), zero)
        parts = (error, error**2, relative, valid.double(), rated.double())
        sums = torch.stack([part.flatten(0, -3).sum(dim=(0, 2)) for part in map(_batched, parts)], dim=-1)
        if self._sums is not None and self._sums.shape != sums.shape:
            raise InputError(f"this batch has {len(sums)} horizon steps, the batches before it had {len(self._sums)}.")
        self._sums = sums if self._sums is None else self._sums + sums.to(self._sums.device)

    def merge(self, other: MaskedMetrics) -> None:
        """Adds what another accumulator, of the same floor, has seen.

        Raises:
            InputError: another floor.
        """
        if other.floor != self.floor:
            raise InputError(f"metrics with MAPE floors of {self.floor:g} and {other.floor:g} mph cannot be merged.")
        if other._sums is not None:
            self._sums = other._sums if self._sums is None else self._sums + other._sums.to(self._sums.device)

    def reduce(self) -> None:
        """Adds what the accumulators of the other ranks have seen; every rank then holds the sums of all."""
        if self._sums is not None:
            self._sums = summed(self._sums)

    @property
    def count(self) -> int:
        """Valid readings seen."""
        return 0 if self._sums is None else int(self._sums[:, 3].sum())

    @property
    def dropped(self) -> int:
        """Valid readings below the floor, which MAPE leaves out."""
        return 0 if self._sums is None else self.count - int(self._sums[:, 4].sum())

    def compute(self) -> Scores:
        """``{"3": {"mae", "rmse", "mape"}, "6": ..., "12": ..., "average": ...}``; MAPE in percent, the others in mph.

        A step beyond the horizon is left out. A step without one valid reading has None throughout and warns.

        Raises:
            RunError: not one valid reading at any step.
        """
        if self._sums is None or self.count == 0:
            raise RunError("there is no valid target to score: every reading is missing, or no batch was added.")
        sums = self._sums.cpu()
        steps = {str(step): sums[step - 1] for step in self.horizons if step <= len(sums)}
        scores = {name: _scores(part) for name, part in [*steps.items(), ("average", sums.sum(dim=0))]}
        empty = [name for name, part in steps.items() if part[3] == 0]
        if empty:
            text = f"no valid target at horizon {', '.join(empty)}: its scores are None."
            warnings.warn(text, SensitivityWarning, stacklevel=2)
        return scores


def _batched(part: Float[Tensor, "*batch horizon node"]) -> Float[Tensor, "... horizon node"]:
    """At least one batch axis."""
    return part if part.ndim > 2 else part[None]


def _scores(sums: Float[Tensor, " 5"]) -> dict[str, float | None]:
    """The three metrics of sums and counts; None where nothing was counted."""
    absolute, squared, relative, count, rated = sums.tolist()
    return {
        "mae": absolute / count if count else None,
        "rmse": (squared / count) ** 0.5 if count else None,
        "mape": 100 * relative / rated if rated else None,
    }


def check_shapes(prediction: Tensor, target: Tensor, mask: Tensor) -> None:
    """Refuses to broadcast: three equal shapes ``(..., horizon, node)``.

    Raises:
        InputError: they differ, or have fewer than two axes.
    """
    if not prediction.shape == target.shape == mask.shape or prediction.ndim < 2:
        raise InputError(
            f"prediction {tuple(prediction.shape)}, target {tuple(target.shape)} and mask {tuple(mask.shape)} must be "
            "of one shape (..., horizon, node)."
        )


def score(
    forecast: Float[Tensor, "window horizon node"], windows: Windows, size: int = 512, floor: float | int = FLOOR
) -> Scores:
    """Scores a forecast of all ``windows`` in mph, such as a naive one."""
    metrics = MaskedMetrics(floor)
    for part, window in zip(forecast.split(size), windows.batches(size), strict=True):
        metrics.update(part, window.target, window.mask)
    return metrics.compute()


def masked_mae(
    prediction: Float[Tensor, "..."],
    target: Float[Tensor, "..."],
    mask: Bool[Tensor, "..."],
) -> Float[Tensor, ""]:
    """Mean of ``|prediction - target|`` over the entries that the mask keeps: a training loss, in mph.

    All three are ``(..., horizon, node)``. A batch without one valid target gives 0 with a graph (all gradients exactly
    0) and a warning.

    Raises:
        InputError: shapes that differ.
    """
    check_shapes(prediction, target, mask)
    count = mask.sum()
    if not count:
        text = "a batch has no valid target: its loss is 0 and it teaches nothing."
        warnings.warn(text, SensitivityWarning, stacklevel=2)
    # The masked difference is taken before abs, so that a NaN in a masked target cannot reach a gradient.
    error = torch.where(mask, prediction - torch.where(mask, target, 0.0), 0.0).abs()
    return error.sum() / count.clamp_min(1)
