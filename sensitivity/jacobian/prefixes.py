"""Causal functions: the rows of an output time need a forward and a backward pass up to that time only.

Nothing is assumed. For every stretch of output times of every group of samples, derivatives along a random direction of
each output are taken through the whole sequence. Only where all of them are exactly zero at every input after the
stretch, so that no derivative is left out, is the sequence up to there run alone; and its outputs and its derivatives
along the same directions must be those of the whole sequence, to rounding, before its rows are used. Otherwise, from
there on, the rows come from the whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.jacobian.graphs import Graph

STRETCHES = 8
SHORTEST = 16  # time steps from which on shorter sequences pay

Function = Callable[[Tensor], Tensor]


def stretches(graph: Graph, prefix: Callable[[int], Graph], chunk: int) -> Iterator[tuple[int, int, Graph]]:
    """Ranges of output times, each with the graph that its rows are to be taken from.

    Args:
        graph: the whole sequence; as many output as input times.
        prefix: runs the first time steps.
        chunk: rows per backward pass.
    """
    length = graph.tokens.shape[1]
    size = math.ceil(length / STRETCHES)
    probes = _Probes(graph, chunk)
    begin = 0
    while begin + size < length:
        part = _checked(probes, prefix, begin, begin + size)
        if part is None:
            break
        yield begin, begin + size, part
        begin += size
    yield begin, length, graph


class _Probes:
    """Derivatives of every output along a random direction of its own, through the whole sequence."""

    def __init__(self, graph: Graph, chunk: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = graph.output.shape[1:]
        self.directions = torch.randn(shape, generator=generator, dtype=torch.float64).to(graph.output)
        self.graph = graph
        self.chunk = chunk
        self.begin, self.made = 0, graph.tokens.new_empty(0, 0, 0, 0)

    def chunks(self, begin: int, end: int) -> Iterator[Int[Tensor, " row"]]:
        """Output times in pieces that fit one backward pass."""
        yield from torch.arange(begin, end, device=self.directions.device).split(self.chunk)

    def rows(self, queries: Int[Tensor, " row"]) -> Float[Tensor, "sample row key in"]:
        """The derivatives at successive output times; as many as fit are taken together."""
        begin, end = int(queries[0]), int(queries[-1]) + 1
        if not self.begin <= begin <= end <= self.begin + self.made.shape[1]:
            times = torch.arange(begin, len(self.directions), device=queries.device)[: self.chunk]
            self.begin, self.made = begin, self.graph.rows(times, self.directions[times])
        return self.made[:, begin - self.begin : end - self.begin]


def _checked(probes: _Probes, prefix: Callable[[int], Graph], begin: int, end: int) -> Graph | None:
    """The first ``end`` time steps alone, if the outputs from ``begin`` depend on no others and come out the same."""
    part = None
    for queries in probes.chunks(begin, end):
        whole = probes.rows(queries)
        if whole[:, :, end:].count_nonzero() > 0:
            return None
        try:
            part = prefix(end) if part is None else part
            rows = part.rows(queries, probes.directions[queries])
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError, InputError):
            return None  # a function of this one length
        if not (_same_output(part, probes.graph, queries) and _same_rows(rows, whole[:, :, :end])):
            return None
    return part


def _same_output(part: Graph, whole: Graph, queries: Int[Tensor, " row"]) -> bool:
    shorter, longer = part.output.detach(), whole.output.detach()
    if shorter.shape != (*longer.shape[:1], part.tokens.shape[1], *longer.shape[2:]):
        return False
    away = (shorter[:, queries] - longer[:, queries]).abs().max()
    return bool(away <= 100 * torch.finfo(away.dtype).eps * longer.abs().max())


def _same_rows(shorter: Float[Tensor, "sample row key in"], longer: Float[Tensor, "sample row key in"]) -> bool:
    """Whether rows agree to rounding, key by key; a key that is tiny beside the row's largest has some room."""
    norms = torch.linalg.vector_norm(longer, dim=-1)
    off = torch.linalg.vector_norm(shorter - longer, dim=-1)
    return bool((off <= torch.finfo(off.dtype).eps * (1000 * norms + 8 * norms.amax(dim=-1, keepdim=True))).all())
