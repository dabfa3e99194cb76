"""Standardising speeds with statistics of the training rows only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.errors import InputError

FLOOR = 1.0
"""Smallest standard deviation in mph: a dead sensor (zero variance) is divided by this."""


@dataclass(frozen=True, eq=False)
class Scaler:
    """``z = (speed - mean) / std``.

    Attributes:
        mean: mph; a scalar, or ``(node,)``.
        std: mph, at least :data:`FLOOR`; of the shape of ``mean``.
        zeros: True if missing readings (zeros) were counted, as much public code does.
    """

    mean: Float[Tensor, "*node"]
    std: Float[Tensor, "*node"]
    zeros: bool = False

    @classmethod
    def fit(
        cls,
        speed: Float[Tensor, "time node"],
        mask: Bool[Tensor, "time node"],
        per_sensor: bool = False,
        zeros: bool = False,
    ) -> Scaler:
        """Mean and (population) standard deviation of ``speed``, taken in float64.

        Args:
            speed: training rows in mph.
            mask: True where the reading is valid; only those count, unless ``zeros``.
            per_sensor: one mean and std for each node; a node without a valid reading takes those of all nodes.
            zeros: count missing readings as speeds of 0 mph.

        Raises:
            InputError: no valid reading among the training rows.
        """
        values = speed.double()
        counts = torch.ones_like(values) if zeros else mask.double()
        if counts.sum() == 0:
            raise InputError(f"none of the {speed.shape[0]} training rows has a valid reading; the scaler has no data.")
        mean, std = _moments(values.flatten(), counts.flatten())
        if per_sensor:
            own_mean, own_std = _moments(values, counts)
            alive = counts.sum(dim=0) > 0
            mean, std = torch.where(alive, own_mean, mean), torch.where(alive, own_std, std)
        return cls(mean.float(), std.clamp_min(FLOOR).float(), zeros)

    def transform(self, speed: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """Mph to z-units; the last axis is the node."""
        return (speed - self.mean.to(speed)) / self.std.to(speed)

    def inverse(self, scaled: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """Z-units to mph; the last axis is the node."""
        return scaled * self.std.to(scaled) + self.mean.to(scaled)

    def state(self) -> dict[str, Any]:
        """Plain values (numbers and lists) that :meth:`from_state` turns into the same scaler."""
        return {"mean": self.mean.tolist(), "std": self.std.tolist(), "zeros": self.zeros}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Scaler:
        """The scaler that :meth:`state` described.

        Raises:
            InputError: an entry is missing.
        """
        missing = {"mean", "std"} - set(state)
        if missing:
            raise InputError(f"a scaler's state needs 'mean' and 'std', but {sorted(missing)} are absent.")
        mean, std = (torch.tensor(state[key], dtype=torch.float32) for key in ("mean", "std"))
        return cls(mean, std, bool(state.get("zeros", False)))


def _moments(
    values: Float[Tensor, "time *node"], counts: Float[Tensor, "time *node"]
) -> tuple[Float[Tensor, "*node"], Float[Tensor, "*node"]]:
    """Weighted mean and population standard deviation over the first axis."""
    total = counts.sum(dim=0).clamp_min(1.0)
    mean = (values * counts).sum(dim=0) / total
    return mean, (((values - mean) ** 2 * counts).sum(dim=0) / total).sqrt()
