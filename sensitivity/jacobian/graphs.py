"""One forward pass, kept for many backward passes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.jacobian.independence import explained
from sensitivity.jacobian.recurrent import Recurrences
from sensitivity.jacobian.shared import vmapped
from sensitivity.jacobian.state import random_state, set_random_state
from sensitivity.jacobian.tails import Tail, Watch, find_tail

Function = Callable[[Tensor], Tensor]


class Graph:
    """The forward pass of a group of samples; run again where the function frees it.

    Args:
        function: maps ``(sample, time, in)`` to ``(sample, time', out)``.
        tokens: the samples.
        copies: most rows in one backward pass; so many replicas of the samples stand along the batch, each with a
            cotangent of its own.
        vmap: whether there are no replicas, and backward passes are vmapped.
        tail: bytes that the factors of a pointwise end of the function may take, which cotangents then go through once
            and for all times together; 0 to look for none. Samples must be independent, and backward passes vmapped.
    """

    def __init__(
        self,
        function: Function,
        tokens: Float[Tensor, "sample time in"],
        copies: int = 1,
        vmap: bool = False,
        tail: int = 0,
    ) -> None:
        self.function = function
        self.tokens = tokens.detach()
        self.copies = 1 if vmap else copies
        self.vmap = vmap
        self.reusable = True
        self.random = random_state()
        self.tail: Tail | None = None
        found = self.forward(Watch(tokens.shape[:2]) if tail > 0 else None)
        if found:
            self.tail = find_tail(self.output, self.leaf, found, tail, copies)

    def forward(self, watch: Watch | None = None) -> list[Tensor]:
        """Runs the function; returns what was watched."""
        self.leaf = self.tokens.repeat(self.copies, 1, 1).requires_grad_(True)
        with contextlib.ExitStack() as stack:
            if self.vmap:
                stack.enter_context(Recurrences())
            if watch is not None:
                stack.enter_context(watch)
            self.output = self.function(self.leaf.clone())
        return [] if watch is None else watch.seen

    def rows(
        self, queries: Int[Tensor, " row"], vectors: Float[Tensor, "row out"], place: slice = slice(None)
    ) -> Float[Tensor, "sample row key in"]:
        """Rows ``v^T J_i.`` of the samples at ``place``, which share a backward pass; ``v`` and ``i`` row by row."""
        count, samples = len(queries), self.tokens.shape[0]
        end = self.output if self.tail is None else self.tail.entry
        values = vectors[:, None] if self.tail is None else self.tail.pulled_back(queries, vectors)[:, place]
        copies = count if self.vmap else self.copies
        cotangent = end.new_zeros(copies, samples, *end.shape[1:])
        cotangent[torch.arange(count, device=queries.device), place, queries] = values.to(end.dtype)
        gradient = self._backward(end, cotangent)
        return gradient.reshape(copies, samples, *self.tokens.shape[1:])[:count, place].transpose(0, 1)

    def _backward(self, end: Tensor, cotangent: Tensor) -> Tensor:
        if not end.requires_grad:
            return cotangent.new_zeros(*cotangent.shape[:2], *self.tokens.shape[1:])
        flat = cotangent if self.vmap else cotangent.flatten(0, 1)
        try:
            return self._differentiate(end, flat)
        except RuntimeError as error:
            if "second time" not in str(error):
                raise explained(error) from error
        self.reusable = False
        return self._differentiate(end, flat)

    def _differentiate(self, end: Tensor, cotangent: Tensor) -> Tensor:
        if not self.reusable:
            set_random_state(self.random)  # a random function keeps its one draw
            self.forward()
            end = self.output
        if self.vmap:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*batching rule.*")  # slow, but right
                return vmapped(end, self.leaf, cotangent, self.reusable)
        (gradient,) = torch.autograd.grad(end, self.leaf, cotangent, retain_graph=self.reusable, allow_unused=True)
        return torch.zeros_like(self.leaf) if gradient is None else gradient
