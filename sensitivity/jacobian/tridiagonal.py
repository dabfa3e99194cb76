"""The largest eigenvalue of many symmetric tridiagonal matrices at once, as a Lanczos iteration needs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

NEWTON = 60  # steps of Newton's method at most; quadratic but for clustered eigenvalues, where each step is a half


def largest_eigenvalue(
    diagonal: Sequence[Float[Tensor, "*axes"]],
    beside: Sequence[Float[Tensor, "*axes"]],
    residual: Float[Tensor, "*axes"],
    tolerance: float,
    beyond: float,
) -> tuple[Float[Tensor, "*axes"], Bool[Tensor, "*axes"], Float[Tensor, "*axes"]]:
    r"""Largest Ritz value :math:`\theta` of each iteration, and how far it can be trusted.

    With :math:`\rho` the residual times the last entry of the Ritz vector, :math:`\theta` is within :math:`\rho` of an
    eigenvalue, and within :math:`\rho^2 / \delta` if no other is within :math:`\delta`. That eigenvalue is the largest
    unless the start missed a larger one: with :math:`p` the characteristic polynomial, the next Lanczos vector times
    :math:`\prod_j \beta_j` is :math:`p(A)` times the start, whose part along an eigenvector of :math:`\lambda` is
    therefore at most :math:`\prod_j \beta_j / p(\lambda)`.

    Args:
        diagonal: the diagonal of the tridiagonal matrices, from the first entry to the last.
        beside: the entries beside it, one fewer, none negative.
        residual: what the next entry beside the diagonal would be.
        tolerance: relative tolerance of the eigenvalue.
        beyond: how much larger, relatively, the eigenvalue is that may have been missed.

    Returns:
        :math:`\theta`; whether it is an eigenvalue to the tolerance; and the largest part of the start that an
        eigenvector of ``1 + beyond`` times :math:`\theta` or more can have gone unseen with.
    """
    dtype = residual.dtype
    diagonal, beside, residual = [x.double() for x in diagonal], [x.double() for x in beside], residual.double()
    squares = [entry.square() for entry in beside]
    top = _largest_root(diagonal, squares, _upper_bound(diagonal, beside))
    error = residual * _last_entry(diagonal, squares, top)
    allowed = tolerance * top
    settled = error <= allowed
    distance = torch.where(settled, 0.0, error.square() / allowed)
    alone = _count_above(diagonal, squares, top - distance) == 1
    unseen = _unseen(diagonal, squares, [*beside, residual], (1 + beyond) * top)
    return top.to(dtype), settled | (alone & (distance < top)), unseen


def _upper_bound(diagonal: Sequence[Tensor], beside: Sequence[Tensor]) -> Tensor:
    """Gershgorin's bound on the largest eigenvalue."""
    none = torch.zeros_like(diagonal[0])
    radii = [left + right for left, right in zip([none, *beside], [*beside, none], strict=True)]
    return torch.stack([entry + radius for entry, radius in zip(diagonal, radii, strict=True)]).amax(dim=0)


def _largest_root(diagonal: Sequence[Tensor], squares: Sequence[Tensor], start: Tensor) -> Tensor:
    """Newton's method on the characteristic polynomials from above, where it falls without passing the root."""
    place, precision = start.clone(), torch.finfo(start.dtype).eps
    for _ in range(NEWTON):
        pivot, rise = place - diagonal[0], torch.ones_like(place)
        sound, total = pivot > 0, 1 / pivot
        for entry, square in zip(diagonal[1:], squares, strict=True):
            quotient = square / pivot
            rise = 1 + quotient * rise / pivot
            pivot = place - entry - quotient
            total += rise / pivot
            sound &= pivot > 0
        step = torch.where(sound, 1 / total, 0.0)  # rounding can carry a converged root past itself: stay there
        place -= step
        if bool((step <= 4 * precision * start).all()):
            break
    return place


def _last_entry(diagonal: Sequence[Tensor], squares: Sequence[Tensor], top: Tensor) -> Tensor:
    """Size of the last entry of the unit eigenvector, found from that end: forwards, rounding would grow over it."""
    pivot, entry = top - diagonal[-1], torch.ones_like(top)
    total = entry.clone()
    for value, square in zip(diagonal[-2::-1], squares[::-1], strict=True):
        entry = entry * pivot.square() / square  # infinite where the space was exhausted before
        total += entry
        pivot = top - value - square / pivot
    return total.rsqrt_().nan_to_num_(0.0)


def _unseen(
    diagonal: Sequence[Tensor], squares: Sequence[Tensor], residuals: Sequence[Tensor], place: Tensor
) -> Tensor:
    """Largest part that the start can have along an eigenvector of ``place``, which is above all Ritz values."""
    pivot = place - diagonal[0]
    part = residuals[0] / pivot
    for entry, square, residual in zip(diagonal[1:], squares, residuals[1:], strict=True):
        pivot = place - entry - square / pivot
        part = part * residual / pivot
    return part.abs_().nan_to_num_(0.0)


def _count_above(diagonal: Sequence[Tensor], squares: Sequence[Tensor], place: Tensor) -> Tensor:
    """How many eigenvalues are larger than ``place`` (Sturm's sequence)."""
    tiny = torch.finfo(place.dtype).tiny
    pivot = diagonal[0] - place
    count = (pivot > 0).to(torch.int16)
    for entry, square in zip(diagonal[1:], squares, strict=True):
        pivot = entry - place - square / torch.where(pivot == 0, tiny, pivot)
        count += pivot > 0
    return count
