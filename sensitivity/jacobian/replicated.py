"""Rows of Jacobians by reverse mode, many in one backward pass.

Either the backward pass through one forward pass is vmapped, or one forward pass carries ``copies`` replicas of a group
of samples along the batch axis, each with a cotangent of its own. Every backward pass yields ``copies`` rows of each
sample; the row loop is the same with one copy. Rows are handed on as they come, so that memory grows with the copies
and never with the size of the Jacobian.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.jacobian.cotangents import Cotangents
from sensitivity.jacobian.independence import explained
from sensitivity.jacobian.recurrent import Recurrences
from sensitivity.jacobian.shared import vmapped
from sensitivity.jacobian.state import random_state, set_random_state

Function = Callable[[Tensor], Tensor]


class Rows(NamedTuple):
    """Rows of the Jacobians of a few samples.

    Attributes:
        samples: which samples, a slice of the batch.
        rows: which rows, as :class:`Cotangents` numbers them.
        vectors: their cotangents.
        gradients: the rows themselves.
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
    """

    copies: int
    group: int
    separate: bool = True
    vmapped: bool = False


def stream(
    function: Function, tokens: Float[Tensor, "sample time in"], cotangents: Cotangents, plan: Plan
) -> Iterator[Rows]:
    """Yields every row of every sample's own Jacobian.

    Raises:
        InputError: the function uses reentrant checkpointing.
    """
    for start in range(0, tokens.shape[0], plan.group):
        samples = slice(start, min(start + plan.group, tokens.shape[0]))
        graph = _Graph(function, tokens[samples], plan)
        for rows in torch.arange(len(cotangents), device=tokens.device).split(plan.copies):
            vectors = cotangents.vectors(rows, graph.output)
            for place in graph.places():
                gradients = graph.rows(cotangents.query(rows), vectors, place)
                yield Rows(_shift(place, samples), rows, vectors, gradients)
        del graph  # before the next group's is built


def _shift(place: slice, samples: slice) -> slice:
    return slice(samples.start + place.start, samples.start + place.stop)


class _Graph:
    """One forward pass, kept for many backward passes; run again where the function frees it."""

    def __init__(self, function: Function, tokens: Tensor, plan: Plan) -> None:
        self.function = function
        self.plan = plan
        self.samples = tokens.shape[0]
        self.copies = 1 if plan.vmapped else plan.copies
        self.tokens = tokens.detach()
        self.reusable = True
        self.random = random_state()
        self.forward()

    def forward(self) -> None:
        self.leaf = self.tokens.repeat(self.copies, 1, 1).requires_grad_(True)
        with Recurrences() if self.plan.vmapped else contextlib.nullcontext():
            self.output = self.function(self.leaf.clone())

    def places(self) -> list[slice]:
        """Which samples share a backward pass."""
        if self.plan.separate:
            return [slice(0, self.samples)]
        return [slice(sample, sample + 1) for sample in range(self.samples)]

    def rows(self, queries: Tensor, vectors: Tensor, place: slice) -> Float[Tensor, "sample row key in"]:
        count, (_, length, out) = len(queries), self.output.shape
        copies = count if self.plan.vmapped else self.copies
        cotangent = self.output.new_zeros(copies, self.samples, length, out)
        index = torch.arange(count, device=queries.device)
        cotangent[index, place, queries] = vectors[:, None, :]
        gradient = self._backward(cotangent)
        return gradient.reshape(copies, self.samples, *self.tokens.shape[1:])[:count, place].transpose(0, 1)

    def _backward(self, cotangent: Tensor) -> Tensor:
        if not self.output.requires_grad:
            return cotangent.new_zeros(*cotangent.shape[:2], *self.tokens.shape[1:])
        flat = cotangent if self.plan.vmapped else cotangent.flatten(0, 1)
        try:
            return self._differentiate(flat)
        except RuntimeError as error:
            if "second time" not in str(error):
                raise explained(error) from error
        self.reusable = False
        return self._differentiate(flat)

    def _differentiate(self, cotangent: Tensor) -> Tensor:
        if not self.reusable:
            set_random_state(self.random)  # a random function keeps its one draw
            self.forward()
        cotangent = cotangent.to(self.output.dtype)
        if self.plan.vmapped:
            with _quiet():
                return vmapped(self.output, self.leaf, cotangent, self.reusable)
        (gradient,) = torch.autograd.grad(
            self.output, self.leaf, cotangent, retain_graph=self.reusable, allow_unused=True
        )
        return torch.zeros_like(self.leaf) if gradient is None else gradient


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from warning that vmap loops over an operation, which is slow but right."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*batching rule.*")
        yield
