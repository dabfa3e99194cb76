"""Search for the largest eigenvalue of every pair's product: iterations, looked at until the value is certain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sensitivity.jacobian.lanczos import Iteration, Scratch
from sensitivity.jacobian.operator import CACHED, BlockOperator
from sensitivity.jacobian.tridiagonal import (
    Lines,
    beyond,
    is_alone,
    is_below,
    largest_eigenvalue,
    largest_of,
    residual,
    unseen,
)

FIRST_CHECK, ROUGH = 6, 1e-2  # steps before Ritz values are looked at, and how closely that first time
CROWDED = 0.75  # a group is packed anew once so much of it or less is open
FEW = 3  # pairs that are given up sooner than iterated on
PATIENCE = 32  # steps after which the word of a random start is taken where no bound is to be had
RARE, BEYOND = 1e-6, 0.05  # a random start hides less than one part in a million of a direction about as rarely
MARGIN = 0.2  # that error is estimated from Ritz values, which stand a little further apart than eigenvalues
ROUNDING = 64  # roundings that the traces may be off by
TILT, TILTED = 2, 0.25  # how far vectors tilt towards a Ritz vector, in roundings over its residual; and may, squared


@dataclass(frozen=True)
class Tools:
    """What the groups of a search share: the start, and scratch memory."""

    start: Float[Tensor, "inner 1"]
    scratch: Scratch


Place = tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]  # rows and keys


class Group:
    """Some rows of a search that fit a cache, iterated together and packed anew as their pairs are closed.

    Attributes:
        rows: which rows of the search they are, ``(row, 1)``.
        keys: which key each pair has.
        open: the pairs that are looked at; the others fill up the rows.
        lines: the entries of their tridiagonal matrices, on the diagonal and beside it, step by step.
        rest: what the steps leave of the traces of operator and squared operator.
        top: the largest Ritz values when last looked at.
    """

    def __init__(
        self,
        operator: BlockOperator,
        rows: Int[Tensor, " row"],
        wanted: Bool[Tensor, "row key"],
        traces: Float[Tensor, "2 all key"] | None,
        tools: Tools,
    ) -> None:
        kept, self.keys, self.open = pack(wanted)
        self.rows, dtype = rows[kept, None], tools.start.dtype
        part = operator.at(rows[kept], self.keys).to(dtype)
        self.lines = part.value.new_empty(2, 0, *self.keys.shape)
        self.iteration = Iteration(part.value, part.deviation, part.inside, part.gram, tools.start, tools.scratch)
        self.rest = None if traces is None else traces[:, self.rows, self.keys].to(dtype)
        self.top = torch.full_like(self.open, torch.inf, dtype=dtype)

    def advance(self, steps: int) -> None:
        """Some steps of the iteration."""
        fresh = torch.stack([torch.stack(self.iteration.step()) for _ in range(steps)], dim=1)
        self.lines = torch.cat([self.lines, fresh], dim=1)
        if self.rest is not None:
            diagonal, beside = fresh
            self.rest[0] -= diagonal.sum(dim=0)
            self.rest[1] -= diagonal.square().sum(dim=0) + 2 * beside.square().sum(dim=0)

    def choose(self, others: int, thorough: bool) -> Place:
        """The open pairs that are worth a look: those whose bound on the rest is below the largest Ritz value."""
        if self.rest is None or thorough:
            return place(self.open)
        return place(self.open & (largest_of(self.rest[0], self.rest[1], others) < self.top))

    def put(self, chosen: Place, top: Float[Tensor, " pair"], done: Bool[Tensor, " pair"]) -> None:
        """Takes up what a look at some pairs has found, and leaves out what is only there to be skipped."""
        if not len(top):
            return
        self.top[chosen] = top.to(self.top.dtype)
        self.open[chosen] = ~done
        counts = self.open.sum(dim=1)
        if int(counts.max() * counts.count_nonzero()) > CROWDED * self.open.numel():
            return
        kept, keys, still = pack(self.open)
        if len(kept):
            self.iteration.keep(kept, keys)
        self.open, self.rows, self.keys = still, self.rows[kept], self.keys[kept].gather(1, keys)
        self.top = self.top[kept].gather(1, keys)
        self.lines = self.lines[:, :, kept].gather(3, keys.expand(2, self.lines.shape[1], -1, -1))
        if self.rest is not None:
            self.rest = self.rest[:, kept].gather(2, keys.expand(2, -1, -1))


class Search:
    """Iterations on the pairs of a tile.

    Attributes:
        top: largest eigenvalue of every pair.
        left: the pairs whose eigenvalue is not found.
    """

    def __init__(
        self,
        operator: BlockOperator,
        wanted: Bool[Tensor, "row key"],
        traces: Float[Tensor, "2 row key"] | None,
        tolerance: float,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.traces, self.tolerance, self.rank, self.left = traces, tolerance, operator.rank, wanted.clone()
        self.top = torch.zeros_like(operator.value[:, 0, 0])
        self.precision, self.rounding = torch.finfo(dtype).eps, ROUNDING * torch.finfo(operator.value.dtype).eps
        inner = len(operator.gram)
        start = torch.randn(inner, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        tools = Tools(start.to(wanted.device, dtype), Scratch(start.to(wanted.device, dtype)))
        counts = wanted.sum(dim=1)
        filled = counts.argsort(descending=True)[: int(counts.count_nonzero())]  # rows alike go together
        height = max(1, CACHED // max(1, inner * int(counts.max())))
        self.groups = [Group(operator, rows, wanted[rows], traces, tools) for rows in filled.split(height) if len(rows)]
        self.limit = 2 * inner

    def run(self) -> Search:
        """Iterates until all but a few pairs are closed, or twice the steps are done that exhaust their space."""
        done = 0
        while self.groups and done < self.limit:
            steps = min(1 if done else FIRST_CHECK, self.limit - done)
            for group in self.groups:
                group.advance(steps)
            done += steps
            self._check(done)
            self.groups = [group for group in self.groups if bool(group.open.any())]
            if sum(int(group.open.sum()) for group in self.groups) <= FEW:
                break
        return self

    def _check(self, done: int) -> None:
        """Looks closer at the pairs that are worth it, and closes those that are found and those that are lost."""
        chosen = [group.choose(self.rank - done, done >= PATIENCE) for group in self.groups]
        row = torch.cat([group.rows[row, 0] for group, (row, _) in zip(self.groups, chosen, strict=True)])
        key = torch.cat([group.keys[at] for group, at in zip(self.groups, chosen, strict=True)])
        lines = [group.lines[:, :, row, key] for group, (row, key) in zip(self.groups, chosen, strict=True)]
        traces = None if self.traces is None else self.traces[:, row, key].double()
        top, found, lost = self._look(Lines(*torch.cat(lines, dim=2).double()), traces)
        self.top[row, key] = top.to(self.top.dtype)
        self.left[row, key] = ~found
        sizes = [len(row) for row, _ in chosen]
        for group, at, *some in zip(self.groups, chosen, top.split(sizes), (found | lost).split(sizes), strict=True):
            group.put(at, *some)

    def _look(
        self, lines: Lines, traces: Float[Tensor, "2 pair"] | None
    ) -> tuple[Float[Tensor, " pair"], Bool[Tensor, " pair"], Bool[Tensor, " pair"]]:
        """Largest Ritz values, which of them are the eigenvalues that are sought, and which cannot be told of."""
        done = len(lines.diagonal)
        first = traces is not None and done == FIRST_CHECK < self.limit
        top, settled = largest_eigenvalue(lines, ROUGH if first else self.tolerance / 8)
        lost = torch.zeros_like(settled)
        if first:
            return top, lost, lost
        found = lost
        if traces is not None:
            total, square = traces
            before = Lines(lines.diagonal[:-1], lines.beside[:-1]) if done > 1 else lines
            rho = residual(before, top)
            tilt = torch.where(rho > 0, (TILT * self.precision * top / rho).square(), 0.0)
            corner = beyond(lines, total, square, self.rank, self.rounding * square + tilt * top.square())
            lost = tilt > TILTED
            found = (settled & ~lost & is_below(lines, corner, (1 + 2 * self.tolerance) * top)) | (square <= 0)
        if traces is None or done >= PATIENCE:
            found = found | (settled & _close(lines, top, 2 * MARGIN * self.tolerance))
        return top, found, lost


def place(chosen: Bool[Tensor, "row key"]) -> Place:
    """Rows and keys of the chosen pairs."""
    row, key = chosen.nonzero(as_tuple=True)
    return row, key


def pack(
    chosen: Bool[Tensor, "row key"],
) -> tuple[Int[Tensor, " some"], Int[Tensor, "some width"], Bool[Tensor, "some width"]]:
    """The rows with any chosen pair, the same number of keys in each with all that are chosen, and which are."""
    counts = chosen.sum(dim=1)
    kept = counts.nonzero()[:, 0]
    mask, keys = chosen[kept].sort(dim=1, descending=True, stable=True)
    width = int(counts.max()) if len(counts) else 0
    return kept, keys[:, :width], mask[:, :width]


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
