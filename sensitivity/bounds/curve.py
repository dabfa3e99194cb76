"""The Law: a predicted curve over the length, put together from rows of every length."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TRUSTED = 0.05
RATIO = 1.5  # between the row lengths at which a causal curve is evaluated

Curve = tuple[Float[Tensor, " replicate"], Float[Tensor, " replicate"]]
"""Mean squared norm off the diagonal and mean norm on it, of rows of one length, from independent replicates."""


@dataclass(frozen=True)
class Law:
    """Predicted sensitivity over the length T, Frobenius norms, one value per length.

    Attributes:
        lengths: T.
        off_diagonal: root mean square norm of the blocks off the diagonal (of the visible pairs of a causal layer); NaN
            where there are none.
        diagonal: mean norm of the diagonal blocks.
        asymptotic_off_diagonal: the same from the limit of large T, infinite where that limit does not exist.
        asymptotic_diagonal: the limit of ``diagonal``.
        standard_error: of ``off_diagonal``, from the sampling of query tokens (and of scores, for several heads).
        valid: where ``off_diagonal`` can be trusted: to 5 % by its standard error, or, for ``finite=False``, by the
            estimated size of what the limit neglects.
        asymptotic_valid: where the limit is within 5 % of ``off_diagonal``.
        method: how it was computed, in words.
    """

    lengths: list[int]
    off_diagonal: Float[Tensor, " length"]
    diagonal: Float[Tensor, " length"]
    asymptotic_off_diagonal: Float[Tensor, " length"]
    asymptotic_diagonal: Float[Tensor, " length"]
    standard_error: Float[Tensor, " length"]
    valid: Bool[Tensor, " length"]
    asymptotic_valid: Bool[Tensor, " length"]
    method: str


def assemble(
    causal: bool,
    lengths: Sequence[int],
    curve: Callable[[int], Curve],
    limits: tuple[float, float],
    method: str,
) -> Law:
    """The law from its curve over rows.

    Args:
        causal: whether row i sees i other tokens instead of T - 1.
        lengths: T.
        curve: what rows with so many other tokens have, by replicate.
        limits: the limit of ``T**2`` times the mean square off the diagonal, and the limit of the norm on it.
        method: in words.
    """
    limit_off, limit_on = _limits(causal, lengths, limits)
    if causal:
        pairs = [_causal(length, *_grid(max(lengths), curve)) for length in lengths]
    else:
        pairs = [curve(length - 1) for length in lengths]
    square = torch.stack([pair[0] for pair in pairs])
    mean = square.mean(dim=-1)
    off = torch.where(torch.tensor(lengths, device=mean.device) > 1, mean.sqrt(), math.nan)
    error = square.std(dim=-1) / square.shape[-1] ** 0.5 / (2 * off)
    limit_off, limit_on = limit_off.to(off), limit_on.to(off)
    return Law(
        lengths=list(lengths),
        off_diagonal=off,
        diagonal=torch.stack([pair[1].mean() for pair in pairs]),
        asymptotic_off_diagonal=limit_off,
        asymptotic_diagonal=limit_on,
        standard_error=error,
        valid=error < TRUSTED * off,
        asymptotic_valid=(limit_off / off - 1).abs() < TRUSTED,
        method=method,
    )


def limit(causal: bool, lengths: Sequence[int], limits: tuple[float, float], errors: list[float] | None) -> Law:
    """The law of large T alone, with estimated relative errors at each length if they are known."""
    off, on = _limits(causal, lengths, limits)
    small = torch.tensor([error < TRUSTED for error in errors or [math.nan] * len(lengths)]) & torch.isfinite(off)
    return Law(list(lengths), off, on, off, on, torch.zeros_like(off), small, small, "limit of large T")


def _limits(causal: bool, lengths: Sequence[int], limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    # in this order max() hands NaN on: no limit is known
    off = [math.sqrt(max(limits[0], 0.0) * _inverse_square(length, causal)) for length in lengths]
    return torch.tensor(off, dtype=torch.float64), torch.full((len(off),), limits[1], dtype=torch.float64)


def _inverse_square(length: int, causal: bool) -> float:
    """Mean of 1 / (keys of a row) ** 2 over the visible pairs."""
    if length < 2:
        return math.nan
    if not causal:
        return 1 / length**2
    return sum(row / (row + 1) ** 2 for row in range(1, length)) / (length * (length - 1) / 2)


def _grid(longest: int, curve: Callable[[int], Curve]) -> tuple[list[int], Tensor, Tensor]:
    """The curve at row lengths spread evenly in their logarithm."""
    places, value = {0, longest - 1}, 1.0
    while value < longest - 1:
        places.add(round(value))
        value *= RATIO
    ordered = sorted(places)
    found = [_known(curve, place) for place in ordered]
    return ordered, torch.stack([pair[0] for pair in found]), torch.stack([pair[1] for pair in found])


@functools.lru_cache(maxsize=64)
def _known(curve: Callable[[int], Curve], others: int) -> Curve:
    return curve(others)


def _causal(length: int, places: list[int], square: Tensor, on: Tensor) -> Curve:
    """Mean over the rows 0 to T - 1 of a causal layer, interpolated between the row lengths that were evaluated."""
    rows = torch.arange(length, dtype=square.dtype, device=square.device)
    grid = torch.tensor(places, dtype=square.dtype, device=square.device)
    log = _interpolate(rows[1:].log(), grid[1:].log(), square[1:].clamp_min(torch.finfo(square.dtype).tiny).log())
    off = (rows[1:, None] * log.exp()).sum(dim=0) / rows.sum().clamp_min(1)
    return off, _interpolate((rows + 1).log(), (grid + 1).log(), on).mean(dim=0)


def _interpolate(at: Tensor, grid: Tensor, values: Float[Tensor, "place replicate"]) -> Float[Tensor, "row replicate"]:
    """Linear interpolation along the first axis."""
    if len(grid) < 2:
        return values.expand(len(at), -1)
    high = torch.searchsorted(grid, at).clamp(1, len(grid) - 1)
    share = ((at - grid[high - 1]) / (grid[high] - grid[high - 1]))[:, None]
    return values[high - 1] * (1 - share) + values[high] * share
