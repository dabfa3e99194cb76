"""The largest eigenvalue of many symmetric tridiagonal matrices at once, and of what they are compressions of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

STEPS = 20  # of Laguerre's method at most: cubic, some four from a bound that knows the first two moments
OFFSET = 1e-9  # what the bound is raised by, relatively, to stand above the root whatever the rounding


@dataclass(frozen=True)
class Lines:
    r"""What an iteration leaves behind: :math:`T_k`, and what the next entry beside its diagonal would be.

    Attributes:
        diagonal: the diagonal of each matrix, first entry first.
        beside: the entries beside it, none negative; the last is the residual :math:`\beta_k`.
    """

    diagonal: Float[Tensor, "step pair"]
    beside: Float[Tensor, "step pair"]

    @property
    def before(self) -> Lines:
        """The lines a step earlier; the first step's own."""
        return Lines(self.diagonal[:-1], self.beside[:-1]) if len(self.diagonal) > 1 else self

    def of(self, pairs: Int[Tensor, " some"]) -> Lines:
        """The lines of some pairs."""
        return Lines(self.diagonal[:, pairs], self.beside[:, pairs])


def largest_eigenvalue(lines: Lines, tolerance: float) -> tuple[Float[Tensor, " pair"], Bool[Tensor, " pair"]]:
    r"""Largest Ritz value :math:`\theta` of each iteration, from above, and whether it is there to the ``tolerance``.

    Laguerre's method from a bound above; it falls to the largest root without passing it.
    """
    diagonal, squares = lines.diagonal, lines.beside[:-1].square()
    place = _bound(lines)
    settled = torch.zeros_like(place, dtype=torch.bool)
    for _ in range(STEPS):
        step = _laguerre(diagonal, squares, place)
        place -= step
        settled = step <= tolerance * place
        if bool(settled.all()):
            break
    return place, settled


def _bound(lines: Lines) -> Float[Tensor, " pair"]:
    r"""What none of the eigenvalues exceeds, by Gershgorin's circles or by their moments.

    From mean and mean square of the eigenvalues that is :math:`\bar\theta + \sqrt{(k-1) (\overline{\theta^2} -
    \bar\theta^2)}`.
    """
    diagonal, sides = lines.diagonal, lines.beside[:-1]
    circles = diagonal.clone()
    circles[1:] += sides
    circles[:-1] += sides
    steps, moment = len(diagonal), diagonal.square().sum(dim=0) + 2 * sides.square().sum(dim=0)
    mean = diagonal.mean(dim=0)
    spread = (moment / steps - mean.square()).clamp_min_(0)
    place = mean + ((steps - 1) * spread).sqrt_()
    return torch.minimum(place, circles.amax(dim=0)).add_(moment.sqrt_(), alpha=OFFSET)


def _laguerre(diagonal: Tensor, squares: Tensor, place: Tensor) -> Tensor:
    r"""One step, :math:`n / (g + \sqrt{(n-1) (n h - g^2)})` with :math:`g = p'/p`, :math:`h = g^2 - p''/p`.

    The pivots :math:`d_i = x - a_i - \beta_{i-1}^2 / d_{i-1}` have the product :math:`p`, so that :math:`g` is the sum
    of :math:`d_i'/d_i` and :math:`h` minus its derivative.
    """
    pivot = place - diagonal[0]
    lowest, inverse = pivot, 1 / pivot
    first, second = inverse, torch.zeros_like(inverse)  # d'/d and d''/d
    total, curvature = first.clone(), first.square()
    for entry, square in zip(diagonal[1:], squares, strict=True):
        quotient = square * inverse
        pivot = (place - entry).sub_(quotient)
        lowest = torch.minimum(lowest, pivot)
        inverse = pivot.reciprocal_()
        second = second.addcmul(first, first, value=-2).mul_(quotient).mul_(inverse)
        first = quotient.mul_(first).add_(1).mul_(inverse)
        total += first
        curvature.addcmul_(first, first).sub_(second)
    count = len(diagonal)
    root = (count * curvature).addcmul_(total, total, value=-1).clamp_min_(0).mul_(count - 1).sqrt_()
    # rounding can carry a converged root past itself: stay there
    return torch.where(lowest > 0, count / root.add_(total), 0.0).nan_to_num_(0.0)


def beyond(
    lines: Lines,
    trace: Float[Tensor, " pair"],
    square: Float[Tensor, " pair"],
    rank: int,
    allowance: Float[Tensor, " pair"],
) -> Float[Tensor, " pair"]:
    r"""Bound :math:`c` of what the operator does outside the space of the iteration.

    In a basis that starts with the Lanczos vectors the operator is :math:`T_k`, coupled by :math:`\beta_k` to a
    positive semidefinite :math:`C` on the :math:`m = n - k` other directions, whose trace :math:`t` and squared
    Frobenius norm :math:`s` are those of the operator less those of :math:`T_k` and, twice, :math:`\beta_k^2`. Of
    numbers with that sum and sum of squares, none exceeds
    :math:`t/m + \sqrt{\tfrac{m-1}{m} (s - t^2/m)}`.

    Args:
        lines: the iteration.
        trace: trace of the operator.
        square: its squared Frobenius norm.
        rank: dimension of the space, :math:`n`.
        allowance: error that :math:`s` may have.
    """
    trace = trace - lines.diagonal.sum(dim=0)
    square = square - lines.diagonal.square().sum(dim=0) - 2 * lines.beside.square().sum(dim=0)
    return largest_of(trace, square, rank - len(lines.diagonal), allowance)


def beyond_squared(
    lines: Lines,
    square: Float[Tensor, " pair"],
    fourth: Float[Tensor, " pair"],
    rank: int,
    allowance: Float[Tensor, " pair"],
) -> Float[Tensor, " pair"]:
    r"""A closer bound than ``beyond``, from the squares of the eigenvalues and their fourth powers.

    In the same basis, the first rows of the operator's square are those of :math:`T_k^2` but for :math:`\beta_k^2` in
    the corner and :math:`\beta_{k-1} \beta_k` beside it; the block on the other directions is at least :math:`C^2`.

    Args:
        lines: the iteration.
        square: squared Frobenius norm of the operator.
        fourth: trace of its fourth power.
        rank: dimension of the space, :math:`n`.
        allowance: error that the fourth powers may have.
    """
    entries, sides = lines.diagonal.square(), lines.beside.square()
    square = square - entries.sum(dim=0) - 2 * sides.sum(dim=0)
    entries = entries + sides
    entries[1:] += sides[:-1]
    fourth = fourth - entries.square().sum(dim=0) - 2 * (sides[:-1] * sides[1:]).sum(dim=0)
    fourth = fourth - 2 * (sides[:-1] * (lines.diagonal[:-1] + lines.diagonal[1:]).square()).sum(dim=0)
    return largest_of(square, fourth, rank - len(lines.diagonal), allowance).sqrt_()


def largest_of(
    total: Float[Tensor, "*axes"],
    square: Float[Tensor, "*axes"],
    count: int,
    allowance: Float[Tensor, "*axes"] | float = 0.0,
) -> Float[Tensor, "*axes"]:
    r"""What none of ``count`` numbers with this sum and, up to ``allowance``, sum of squares exceeds."""
    if count < 1:
        return (square.clamp_min(0) + allowance).sqrt_()
    mean = total.clamp_min(0) / count
    spread = (square - count * mean.square()).clamp_min_(0) + allowance
    return mean + (spread * ((count - 1) / count)).sqrt_()


def is_below(lines: Lines, corner: Float[Tensor, " pair"], place: Float[Tensor, " pair"]) -> Bool[Tensor, " pair"]:
    r"""Whether the largest eigenvalue of :math:`T_k`, bordered by :math:`\beta_k` and ``corner``, is below ``place``.

    With a ``corner`` that bounds the rest of the operator, then so is every eigenvalue of the operator: all pivots of
    its difference from ``place`` times the identity are positive.
    """
    pivot = place - lines.diagonal[0]
    sound = pivot > 0
    for entry, side in zip([*lines.diagonal[1:], corner], lines.beside, strict=True):
        pivot = (place - entry).sub_(side.square() / pivot)
        sound &= pivot > 0
    return sound


def residual(lines: Lines, top: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
    r""":math:`\rho`, the residual times the last entry of the Ritz vector: an eigenvalue is within it of ``top``.

    The vector is found from its last entry: from the first, rounding would grow over it.
    """
    pivot, entry = top - lines.diagonal[-1], torch.ones_like(top)
    total = entry.clone()
    for value, side in zip(lines.diagonal[:-1].flip(0), lines.beside[:-1].flip(0), strict=True):
        square = side.square()
        entry = entry * pivot.square() / square  # infinite where the space was exhausted before
        total += entry
        pivot = (top - value).sub_(square / pivot)
    return total.rsqrt_().nan_to_num_(0.0) * lines.beside[-1]


def is_alone(lines: Lines, top: Float[Tensor, " pair"], distance: Float[Tensor, " pair"]) -> Bool[Tensor, " pair"]:
    """Whether no other Ritz value is within ``distance`` of the largest (Sturm's sequence)."""
    place, tiny = top - distance, torch.finfo(top.dtype).tiny
    pivot = lines.diagonal[0] - place
    count = (pivot > 0).to(torch.int16)
    for entry, side in zip(lines.diagonal[1:], lines.beside, strict=False):
        pivot = (entry - place).sub_(side.square() / torch.where(pivot == 0, tiny, pivot))
        count += pivot > 0
    return count <= 1


def unseen(lines: Lines, place: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
    r"""Largest part that the start can have along an eigenvector of ``place``, which is above all Ritz values.

    With :math:`p` the characteristic polynomial, the next Lanczos vector times :math:`\prod_j \beta_j` is :math:`p(A)`
    times the start, whose part along that eigenvector is therefore at most :math:`\prod_j \beta_j / p`.
    """
    pivot = place - lines.diagonal[0]
    part = lines.beside[0] / pivot
    for entry, before, side in zip(lines.diagonal[1:], lines.beside, lines.beside[1:], strict=False):
        pivot = (place - entry).sub_(before.square() / pivot)
        part = part * side / pivot
    return part.abs_().nan_to_num_(0.0)
