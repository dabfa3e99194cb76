"""The verdict on a bound: what was compared, what was found."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sensitivity.bounds.assumptions import Assumption

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
FLOOR = 1e-140
"""Norms below it are taken as zero: their squares leave the range of float64."""


@dataclass(frozen=True)
class Comparison:
    """Measured values beside the bound on them, ready to be judged.

    Attributes:
        measured: what was measured; for a bound on a mean, the mean.
        bound: the bound, broadcast to the shape of ``measured``.
        compared: which entries count.
        blocks: how many blocks of the Jacobian these entries stand for.
        lower: whether the bound is one from below.
        rounding: absolute error that rounding may leave in ``measured``, broadcast to its shape.
    """

    measured: Tensor
    bound: Tensor
    compared: Tensor
    blocks: int
    lower: bool = False
    rounding: Tensor | float = FLOOR


class NotApplicableError(Exception):
    """A bound says nothing about this layer; the message is the reason."""


@dataclass(frozen=True)
class BoundCheck:
    """How one bound fared on one layer.

    Attributes:
        name: its name in ``theory.BOUNDS``.
        applies: whether it says anything about this layer; if not, ``reason`` tells why and nothing is counted.
        violations: entries with measured > bound (1 + tolerance), or below a lower bound.
        blocks: blocks of the Jacobian that the comparison covers.
        tightness: median of measured / bound (bound / measured for a lower bound): 1 is perfect, NaN if nothing
            compared.
        quantiles: quantiles of the same ratio by level; the last one is the closest call.
        where: ``(sample, query, key)`` of the first violation; None for an index that a mean or a whole map has not
            got.
        assumptions: by text, each with its number; true where it holds.
        bound: mean of the bound over the entries compared.
        measured: mean of what was measured there.
        reason: why it does not apply.
    """

    name: str
    applies: bool
    violations: int = 0
    blocks: int = 0
    tightness: float = float("nan")
    quantiles: dict[float, float] = field(default_factory=dict)
    where: tuple[int | None, int | None, int | None] | None = None
    assumptions: dict[str, Assumption] = field(default_factory=dict)
    bound: float = float("nan")
    measured: float = float("nan")
    reason: str = ""

    def __bool__(self) -> bool:
        """Whether nothing contradicts the bound."""
        return self.violations == 0


def judge(
    name: str,
    comparison: Comparison,
    tolerance: float,
    assumptions: list[Assumption],
    unit: float = 1.0,
    rows: Tensor | None = None,
) -> BoundCheck:
    """Compares, counts and summarises.

    Args:
        name: the bound's name.
        comparison: measured values and bound.
        tolerance: relative slack for rounding.
        assumptions: what the bound assumes, as tested.
        unit: what norms are divided by (sqrt(dim) for ``rms``).
        rows: query times of the rows of the comparison, for ``where``.
    """
    bound = comparison.bound.broadcast_to(comparison.measured.shape)
    low, high = (bound, comparison.measured) if comparison.lower else (comparison.measured, bound)
    wrong = comparison.compared & ~(low <= high * (1 + tolerance) + comparison.rounding)
    measured, kept = comparison.measured[comparison.compared], bound[comparison.compared]
    top, bottom = (kept, measured) if comparison.lower else (measured, kept)
    rounding = torch.as_tensor(comparison.rounding, dtype=bound.dtype, device=bound.device).broadcast_to(bound.shape)
    ratio = (top / bottom)[bottom > (1e3 * rounding[comparison.compared]).clamp_min(FLOOR)]
    return BoundCheck(
        name=name,
        applies=True,
        violations=int(wrong.sum()),
        blocks=comparison.blocks,
        tightness=_quantile(ratio, 0.5),
        quantiles={level: _quantile(ratio, level) for level in QUANTILES} if len(ratio) else {},
        where=_first(wrong, rows) if wrong.any() else None,
        assumptions={assumption.text: assumption for assumption in assumptions},
        bound=float(kept.mean()) / unit,
        measured=float(measured.mean()) / unit,
    )


def _quantile(values: Tensor, level: float) -> float:
    """Quantile by rank; torch.quantile refuses more than 16 million entries."""
    if len(values) == 0:
        return float("nan")
    return float(values.kthvalue(1 + round(level * (len(values) - 1))).values)


def _first(wrong: Tensor, rows: Tensor | None) -> tuple[int | None, int | None, int | None]:
    index: list[int | None] = [int(part) for part in wrong.nonzero()[0]]
    if len(index) > 1 and rows is not None and index[1] is not None:
        index[1] = int(rows[index[1]])
    index += [None] * (3 - len(index))
    return index[0], index[1], index[2]
