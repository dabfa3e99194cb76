"""Search for the largest eigenvalue of every pair's product: iterations, looked at until the value is certain."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sensitivity.jacobian.lanczos import Iteration
from sensitivity.jacobian.operator import BlockOperator
from sensitivity.jacobian.segments import Segments
from sensitivity.jacobian.tridiagonal import (
    Lines,
    beyond,
    beyond_squared,
    is_alone,
    is_below,
    largest_eigenvalue,
    largest_of,
    residual,
    unseen,
)

FIRST, SECOND = 3, 6  # steps after which Ritz values are looked at roughly
ROUGH = 1e-2  # how closely then
STRIDE = 2  # steps between the looks after them
CROWDED = 0.65  # pairs are packed anew once they fit in so many of their segments
FEW = 3  # pairs that are given up sooner than iterated on
PATIENCE = 32  # steps after which the word of a random start is taken where no bound is to be had
RARE, BEYOND = 1e-6, 0.05  # a random start hides less than one part in a million of a direction about as rarely
MARGIN = 0.2  # that error is estimated from Ritz values, which stand a little further apart than eigenvalues
ROUNDING = 64  # roundings that the traces may be off by
TILT, TILTED = 2, 0.25  # how far vectors tilt towards a Ritz vector, in roundings over its residual; and may, squared


class Search:
    """Iterations on the pairs of a tile.

    Args:
        operator: their products.
        wanted: which of them.
        traces: of the products and their squares; None where those are not known.
        tolerance: relative, of a singular value.
        dtype: precision of the iterations.
        before: a search in lower precision, whose values are right where it lost the proof of them.
        seed: of the random start.

    Attributes:
        top: largest eigenvalue of every pair.
        left: the pairs whose eigenvalue is not found.
        lost: those of them whose vectors are no longer orthogonal.
    """

    def __init__(
        self,
        operator: BlockOperator,
        wanted: Bool[Tensor, "row key"],
        traces: Float[Tensor, "2 row key"] | None,
        tolerance: float,
        dtype: torch.dtype,
        before: Search | None = None,
        seed: int = 0,
    ) -> None:
        self.operator = operator
        self.traces, self.tolerance, self.rank, self.left = traces, tolerance, operator.rank, wanted.clone()
        self.top, self.lost = torch.zeros_like(operator.value[:, 0, 0]), torch.zeros_like(wanted)
        self.precision, self.rounding = torch.finfo(dtype).eps, ROUNDING * torch.finfo(operator.value.dtype).eps
        self.limit = 2 * self.rank
        start = torch.randn(2, self.rank, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.pairs = pairs = Segments.of(wanted)
        self.iteration = Iteration(operator, pairs, start.to(wanted.device, dtype), turned=traces is not None)
        self.lines = operator.value.new_empty(2, 0, *pairs.key.shape, dtype=dtype)
        at = (pairs.row[:, None], pairs.key)
        # what the steps leave of the traces; the largest Ritz values so far, and which of them no longer rise
        self.rest = None if traces is None else traces[:, at[0], at[1]].to(dtype)
        self.known = before is not None and traces is not None
        self.ritz = torch.zeros(pairs.key.shape, dtype=torch.float64, device=wanted.device)
        self.still = torch.zeros_like(pairs.open)
        if before is not None:
            self.ritz, self.still = before.top[at].double(), before.lost[at]

    def run(self) -> Search:
        """Iterates until all but a few pairs are closed, or twice the steps are done that exhaust their space."""
        done = 0
        while done < self.limit and int(self.pairs.open.sum()) > (FEW if done else 0):
            steps = min(self._steps(done), self.limit - done)
            self._advance(steps)
            done += steps
            if done <= SECOND and self.rest is not None and not self.known:
                rough, _ = largest_eigenvalue(Lines(*self.lines.flatten(2)), ROUGH)  # too large, by a little
                self.ritz = rough.view_as(self.ritz).double()
            self._check(done)
        return self

    def _steps(self, done: int) -> int:
        """How many steps are done before the next look."""
        return FIRST if done < SECOND else STRIDE

    def _advance(self, steps: int) -> None:
        fresh = self.iteration.advance(steps)
        self.lines = torch.cat([self.lines, fresh], dim=1)
        if self.rest is not None:
            diagonal, beside = fresh
            self.rest[0] -= diagonal.sum(dim=0)
            self.rest[1] -= diagonal.square().sum(dim=0) + 2 * beside.square().sum(dim=0)

    def _check(self, done: int) -> None:
        """Looks closer at the pairs that are worth it, and closes those that are found and those that are lost."""
        pairs, chosen = self.pairs, self.pairs.open
        if self.rest is not None and done < PATIENCE:  # whose bound on the rest is below the largest Ritz value
            chosen = chosen & (largest_of(self.rest[0], self.rest[1], self.rank - done) < self.ritz)
        at = chosen.nonzero(as_tuple=True)
        lines = Lines(*self.lines[:, :, at[0], at[1]].double())
        row, key = pairs.row[at[0]], pairs.key[at]
        traces = None if self.traces is None else self.traces[:, row, key].double()
        top, there = self._top(lines, self.ritz[at], at)
        found, lost = self._judge(lines, traces, top, there, row, key)
        self.ritz[at] = top
        self.top[row, key] = top.to(self.top.dtype)
        self.left[row, key], self.lost[row, key] = ~found, lost & ~found
        pairs.open[at] = ~(found | lost)
        if pairs.needed <= CROWDED * len(pairs.row):
            self._pack()

    def _pack(self) -> None:
        self.pairs, at = self.pairs.packed()
        self.iteration.keep(self.pairs.row, at)
        self.lines, self.ritz, self.still = self.lines[:, :, at[0], at[1]], self.ritz[at], self.still[at]
        if self.rest is not None:
            self.rest = self.rest[:, at[0], at[1]]

    def _top(
        self, lines: Lines, top: Float[Tensor, " pair"], at: tuple[Tensor, ...]
    ) -> tuple[Float[Tensor, " pair"], Bool[Tensor, " pair"]]:
        """Largest Ritz values, and whether they are there; those that have stood still for a look are not asked."""
        if self.traces is None or len(lines.diagonal) >= PATIENCE:
            return largest_eigenvalue(lines, self.tolerance / 8)
        still, there = self.still[at], torch.ones_like(top, dtype=torch.bool)
        (moving,) = (~still).nonzero(as_tuple=True)
        if not len(moving):
            return top, there
        fresh, there[moving] = largest_eigenvalue(lines.of(moving), self.tolerance / 8)
        risen = (fresh - top[moving]).abs()
        still[moving] = there[moving] & (risen <= self.tolerance / 8 * fresh) & (len(lines.diagonal) > SECOND)
        top[moving], self.still[at] = fresh, still
        return top, there

    def _judge(
        self,
        lines: Lines,
        traces: Float[Tensor, "2 pair"] | None,
        top: Float[Tensor, " pair"],
        there: Bool[Tensor, " pair"],
        row: Int[Tensor, " pair"],
        key: Int[Tensor, " pair"],
    ) -> tuple[Bool[Tensor, " pair"], Bool[Tensor, " pair"]]:
        """Which Ritz values are the eigenvalues that are sought, and which cannot be told of."""
        found = lost = torch.zeros_like(there)
        if traces is not None:
            found, lost = self._prove(lines, traces, top)
            (some,) = (lost & ~found).nonzero(as_tuple=True)
            if len(some):
                found[some] = self._prove_late(lines.of(some), traces[:, some], top[some], row[some], key[some])
            found = (found & there) | (traces[1] <= 0)
        if traces is None or len(lines.diagonal) >= PATIENCE:
            found = found | (there & _close(lines, top, 2 * MARGIN * self.tolerance))
        return found, lost

    def _prove(
        self,
        lines: Lines,
        traces: Float[Tensor, "2 pair"],
        top: Float[Tensor, " pair"],
        fourth: Float[Tensor, " pair"] | None = None,
    ) -> tuple[Bool[Tensor, " pair"], Bool[Tensor, " pair"]]:
        """Whether nothing that the steps have missed can be larger, and whether nothing can be told any more."""
        total, square = traces
        rho = residual(lines.before, top)
        tilt = torch.where(rho > 0, (TILT * self.precision * top / rho).square(), 0.0)
        if fourth is None:
            corner = beyond(lines, total, square, self.rank, self.rounding * square + tilt * top.square())
        else:
            allowance = self.rounding * fourth + tilt * top.square().square()
            corner = beyond_squared(lines, square, fourth, self.rank, allowance)
        lost = tilt > TILTED
        return ~lost & is_below(lines, corner, (1 + 2 * self.tolerance) * top), lost

    def _prove_late(
        self,
        lines: Lines,
        traces: Float[Tensor, "2 pair"],
        top: Float[Tensor, " pair"],
        row: Int[Tensor, " pair"],
        key: Int[Tensor, " pair"],
    ) -> Bool[Tensor, " pair"]:
        """Whether pairs that are lost can be told of by fewer steps, or by the fourth powers of their eigenvalues."""
        once = lines.before
        found, _ = self._prove(once, traces, top)
        (some,) = (~found).nonzero(as_tuple=True)
        if len(some):
            fourth = self.operator.fourth(row[some], key[some]).to(top)
            for part in (once.before.before, once.before):  # so few steps that their vectors are orthogonal
                found[some] |= self._prove(part.of(some), traces[:, some], top[some], fourth)[0]
        return found


def _close(lines: Lines, top: Float[Tensor, " pair"], tolerance: float) -> Bool[Tensor, " pair"]:
    r"""Whether the Ritz values look converged, and a random start is unlikely to have missed more than a little.

    The largest is within :math:`\rho` of an eigenvalue, and within :math:`\rho^2 / \delta` if no other is within
    :math:`\delta`, for which the Ritz values are asked. An eigenvalue that is larger by ``BEYOND`` has gone unseen only
    if the start is all but orthogonal to its eigenvector.
    """
    allowed, rho = tolerance * top, residual(lines, top)
    within = rho <= allowed
    distance = torch.where(within, 0.0, rho.square() / allowed)
    near = within | (is_alone(lines, top, distance) & (distance < top))
    return near & (unseen(lines, (1 + BEYOND) * top) < RARE)
