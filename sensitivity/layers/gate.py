"""The gate on the residual path."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sensitivity.errors import InputError


class ResidualGate(nn.Module):
    r"""A scalar on the residual branch: :math:`h_i = \gamma x_i + o_i`.

    The residual path of every diagonal block becomes :math:`\gamma I`; the value, key and query paths are untouched. It
    is the only regulariser of the path that dominates the diagonal: :math:`\|I\|_F = \sqrt D`. :math:`\gamma = 1` is
    the plain residual, :math:`\gamma = 0` none at all.

    Args:
        value: :math:`\gamma`, or where it begins if it is learned.
        learned: whether :math:`\gamma` is trained with the model.

    Raises:
        InputError: ``value`` is not a finite number.
    """

    def __init__(self, value: float | int = 1.0, learned: bool = False) -> None:
        super().__init__()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"ResidualGate takes a finite number, not {value!r}; 1 is the plain residual.")
        self.value, self.learned = float(value), bool(learned)
        self.gate = nn.Parameter(torch.tensor(self.value)) if self.learned else None

    def forward(self, tokens: Tensor) -> Tensor:
        """The tokens times the gate."""
        return tokens * (self.value if self.gate is None else self.gate)

    @property
    def factor(self) -> float:
        """The gate as it is now."""
        return self.value if self.gate is None else float(self.gate.detach())

    def config(self) -> dict[str, Any]:
        """``{"value": value, "learned": learned}``, with the value that it began with."""
        return {"value": self.value, "learned": self.learned}

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"value={self.value:g}, learned={self.learned}"


def residual_from_config(config: bool | dict[str, Any]) -> bool | ResidualGate:
    """The residual that a configuration describes: True, False, or a gate.

    Raises:
        InputError: neither, or arguments that a gate does not take.
    """
    if isinstance(config, bool):
        return config
    if not isinstance(config, dict) or set(config) != {"value", "learned"}:
        raise InputError(f"residual must be True, False or the value and learned of a gate, not {config!r}.")
    return ResidualGate(**config)
