"""Lanczos iteration on many structured products at once, in buffers that are made once."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

NOISE = 100  # a residual below so many roundings of what it is the rest of is one itself: the space is exhausted


class Scratch:
    """Memory that iterations use in turn, so that it stays in the cache."""

    def __init__(self, like: Tensor) -> None:
        self.memory = like.new_empty(0)

    def take(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Tensors of these shapes, with anything in them, until the next call."""
        sizes = [math.prod(shape) for shape in shapes]
        if sum(sizes) > len(self.memory):
            self.memory = self.memory.new_empty(sum(sizes))
        parts = self.memory[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class Iteration:
    r"""Lanczos vectors of the products :math:`K G`, with :math:`K = [D, R] N [D, R]^T`, symmetric in :math:`G`.

    :math:`D` multiplies every head by ``value`` and the columns of :math:`R` are the heads of ``deviation``, each among
    zeros. A vector is kept at the length at which it arises, and its length beside it, which saves a pass over it.

    Attributes:
        length: :math:`\beta`, the length of ``vector``; zero where the space is exhausted.
        beside: the same, but zero before the first step: the last entry beside the diagonal.
        vector: the latest Lanczos vector times its length.
        before: the one before it, times the length of that.
    """

    def __init__(
        self,
        value: Float[Tensor, "row head 1 key"],
        deviation: Float[Tensor, "row head width key"],
        inside: Float[Tensor, "row both both"],
        gram: Float[Tensor, "inner inner"],
        start: Float[Tensor, "inner 1"],
        scratch: Scratch,
    ) -> None:
        self.value, self.deviation, self.inside, self.gram = value, deviation, inside, gram
        rows, self.heads, _, keys = value.shape
        self.vector = start.expand(rows, len(gram), keys).contiguous()
        self.before = torch.zeros_like(self.vector)
        self.length_before = torch.ones_like(value[:, 0])
        self.image, self.scratch = torch.empty_like(self.vector), scratch
        self.length = self._measure().sqrt_()
        self.beside = torch.zeros_like(self.length)  # the start has its length from nowhere: no rounding comes of it

    def _measure(self) -> Float[Tensor, "row 1 key"]:
        r"""Image of ``vector`` under :math:`G`, kept, and their inner product."""
        torch.bmm(self.gram.expand(len(self.vector), -1, -1), self.vector, out=self.image)
        (product,) = self.scratch.take(self.vector.shape)
        return torch.mul(self.image, self.vector, out=product).sum(dim=1, keepdim=True).clamp_min_(0)

    def step(self) -> tuple[Float[Tensor, "row key"], Float[Tensor, "row key"]]:
        """The next entry on the diagonal of each tridiagonal matrix, and the next beside it."""
        rows, inner, keys = self.vector.shape
        split, image = (self.heads, -1), self.image.unflatten(1, (self.heads, -1))
        unit = torch.where(self.length > 0, 1 / self.length, 0.0)
        coefficients, combined, product = self.scratch.take(*[(rows, inner + self.heads, keys)] * 3)
        torch.mul(image, self.value * unit[:, None], out=coefficients[:, :inner].unflatten(1, split))
        onto = torch.mul(image, self.deviation, out=product[:, :inner].unflatten(1, split)).sum(dim=2)
        torch.mul(onto, unit, out=coefficients[:, inner:])
        torch.bmm(self.inside, coefficients, out=combined)
        along = torch.mul(coefficients, combined, out=product).sum(dim=1, keepdim=True)
        fresh = self.before.mul_(-self.length / self.length_before)
        fresh.addcmul_(self.vector, -along * unit)
        heads = fresh.unflatten(1, split)
        heads.addcmul_(combined[:, :inner].unflatten(1, split), self.value)
        heads.addcmul_(self.deviation, combined[:, inner:, None])
        self.before, self.vector = self.vector, fresh
        # an exhausted space leaves rounding noise: from there on zeros, and the Ritz values stay exact
        noise = NOISE * torch.finfo(fresh.dtype).eps * (along.abs() + self.beside)
        self.length_before = torch.where(self.length > 0, self.length, 1.0)
        length = self._measure().sqrt_()
        self.length = self.beside = torch.where(length > noise, length, 0.0)
        return along[:, 0], self.length[:, 0]

    def keep(self, rows: Int[Tensor, " row"], keys: Int[Tensor, "row key"]) -> None:
        """Goes on with some rows, and some keys of each, alone."""

        def some(part: Tensor) -> Tensor:
            index = keys.reshape(len(rows), *[1] * (part.dim() - 2), keys.shape[1])
            return (part[rows] if len(rows) < len(part) else part).gather(-1, index.expand(-1, *part.shape[1:-1], -1))

        self.value, self.deviation, self.inside = some(self.value), some(self.deviation), self.inside[rows]
        self.vector, self.before, self.image = some(self.vector), some(self.before), some(self.image)
        self.length, self.length_before = some(self.length), some(self.length_before)
        self.beside = self.length
