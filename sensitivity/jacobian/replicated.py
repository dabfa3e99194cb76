"""Rows of Jacobians by reverse mode, many in one backward pass.

Either the backward pass through one forward pass is vmapped, or one forward pass carries ``copies`` replicas of a group
of samples along the batch axis, each with a cotangent of its own. Every backward pass yields ``copies`` rows of each
sample; the row loop is the same with one copy. Rows are handed on as they come, so that memory grows with the copies
and never with the size of the Jacobian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.jacobian.cotangents import Cotangents
from sensitivity.jacobian.graphs import Graph
from sensitivity.jacobian.prefixes import stretches

Function = Callable[[Tensor], Tensor]


class Rows(NamedTuple):
    """Rows of the Jacobians of a few samples.

    Attributes:
        samples: which samples, a slice of the batch.
        rows: which rows, as :class:`Cotangents` numbers them.
        vectors: their cotangents.
        gradients: the rows themselves, up to some key; they are zero after it.
    """

    samples: slice
    rows: Int[Tensor, " row"]
    vectors: Float[Tensor, "row out"]
    gradients: Float[Tensor, "sample row key in"]


@dataclass(frozen=True)
class Plan:
    """How the batch axis is used.

    Attributes:
        copies: rows per sample in one backward pass.
        group: samples per forward pass.
        separate: whether samples can share a backward pass; otherwise each takes its own, over the true batch.
        vmapped: whether the copies share one forward pass and the backward pass is vmapped.
        tail: bytes for the factors of a pointwise end of the function; 0 to look for none.
        prefixes: whether to see if shorter sequences will do, as in a causal function.
    """

    copies: int
    group: int
    separate: bool = True
    vmapped: bool = False
    tail: int = 0
    prefixes: bool = False


def stream(
    function: Function, tokens: Float[Tensor, "sample time in"], cotangents: Cotangents, plan: Plan
) -> Iterator[Rows]:
    """Yields every row of every sample's own Jacobian; keys that it cannot depend on may be left off at the end.

    Raises:
        InputError: the function uses reentrant checkpointing.
    """
    for start in range(0, tokens.shape[0], plan.group):
        samples = slice(start, min(start + plan.group, tokens.shape[0]))
        for begin, end, graph in _parts(function, tokens[samples], plan):
            end = min(end, cotangents.queries)
            every = torch.arange(begin * cotangents.per_query, end * cotangents.per_query, device=tokens.device)
            for rows in every.chunk(math.ceil(len(every) / plan.copies)):
                vectors = cotangents.vectors(rows, graph.output)
                for place in _places(samples, plan.separate):
                    gradients = graph.rows(cotangents.query(rows), vectors, place)
                    yield Rows(slice(start + place.start, start + place.stop), rows, vectors, gradients)
            del graph  # before the next one is made


def _parts(function: Function, tokens: Tensor, plan: Plan) -> Iterator[tuple[int, int, Graph]]:
    """Ranges of output times with the graphs of their rows; the last range is open."""

    def graph(length: int) -> Graph:
        tail = plan.tail if whole.tail is not None else 0  # a shorter sequence ends as the whole one does
        return Graph(function, tokens[:, :length], plan.copies, plan.vmapped, tail)

    whole = Graph(function, tokens, plan.copies, plan.vmapped, plan.tail)
    if plan.prefixes:
        yield from stretches(whole, graph, plan.copies)
    else:
        yield 0, whole.output.shape[1], whole


def _places(samples: slice, separate: bool) -> list[slice]:
    """Which samples of a group share a backward pass."""
    count = samples.stop - samples.start
    return [slice(0, count)] if separate else [slice(sample, sample + 1) for sample in range(count)]
