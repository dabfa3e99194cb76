"""Lanczos iteration on many structured products at once, some of them at a time for the caches to hold."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.jacobian.operator import BlockOperator
from sensitivity.jacobian.segments import Places, Segments, taken

CACHED = 2**19  # numbers in the vectors that are worked on at a time, for the caches to hold
SMALL, FLAT = 32, 0.4  # spaces that are exhausted soon; and the power of a rounding that directions may differ by
SPREAD = 0.3  # of a start that is turned towards large directions, what is left to chance
NOISE = 100  # a residual below so many roundings of what it is the rest of is one itself: the space is exhausted


class Iteration:
    r"""Lanczos vectors of the products :math:`K G`, with :math:`K = [D, R] N [D, R]^T` and :math:`G = W^T W`.

    :math:`D` multiplies every head by ``value`` and the columns of :math:`R` are the heads of ``deviation``, each among
    zeros. With :math:`M = K G` the vectors are :math:`v_{k+1} = v_{k-1} + c_k (M v_k - \alpha_k v_k)`. At the length
    :math:`|c_k| \ell_k \beta_k`, with :math:`c_k = -1 / (c_{k-1} \beta_{k-1}^2)`, the one before last needs no factor,
    and none is brought to length one: each would be a pass over all of them. What :math:`G` hardly sees of a vector
    grows from step to step, most where the space is nearly exhausted: unless it sees all of a large space, the vectors
    are those of :math:`W K W^T`, which costs one more product a step.

    Args:
        operator: the products.
        segments: the pairs.
        start: two random vectors, ``operator.rank`` long, in the precision of the iteration.
        turned: whether all begin with the second one and, more of it, what the value path makes of the first; or with
            the first as it is.
    """

    def __init__(
        self, operator: BlockOperator, segments: Segments, start: Float[Tensor, "2 rank 1"], turned: bool = False
    ) -> None:
        outputs = operator.outputs.to(start)
        self.outputs = None if _sees_all(outputs) else outputs
        start = _turned(start, outputs, operator.values.to(start), self.outputs is None) if turned else start[0]
        self.onto = outputs.mT @ outputs if self.outputs is None else outputs.mT
        self.heads, self.inside, self.row = operator.value.shape[1], operator.inside.to(start), segments.row
        self.value, self.deviation = (
            segments.spread(part.flatten(1, 2)).to(start) for part in (operator.value, operator.deviation)
        )
        pairs, image = (len(self.value), -1, self.value.shape[2]), self.onto @ start
        self.vector, self.image = (part.expand(pairs).contiguous() for part in (start, image))
        self.before = torch.zeros_like(self.vector)
        square = ((image if self.outputs is None else start) * start).sum()
        self.inverse = torch.where(square > 0, 1 / square, 0.0).expand_as(self.value[:, :1]).contiguous()
        self.factor = torch.ones_like(self.inverse)
        self.beside = torch.zeros_like(self.inverse)  # the start has its length from nowhere: no rounding comes of it
        self._scratch = start.new_empty(0)

    def advance(self, steps: int) -> Float[Tensor, "2 step segment width"]:
        """The next entries of the tridiagonal matrices, on the diagonal and beside it."""
        entries = self.value.new_empty(2, steps, len(self.value), self.value.shape[2])
        height = max(1, CACHED // self.deviation[0].numel())
        for low in range(0, len(self.value), height):
            self._advance(slice(low, low + height), entries[:, :, low : low + height, None])
        if steps % 2:
            self.vector, self.before = self.before, self.vector
        return entries

    def _advance(self, some: slice, entries: Float[Tensor, "2 step segment 1 width"]) -> None:
        value, deviation, image = (part[some] for part in (self.value, self.deviation, self.image))
        vector, before, inside = self.vector[some], self.before[some], self.inside[self.row[some]]
        inner, split = image.shape[1], (self.heads, -1)
        (coefficients, combined, product), onto = self._take(inside, image), self.onto.expand(len(image), -1, -1)
        by_head = [part[:, :inner].unflatten(1, split) for part in (coefficients, combined, product)]
        images, deviations, value = image.unflatten(1, split), deviation.unflatten(1, split), value[:, :, None]
        inverse, factor, beside = self.inverse[some], self.factor[some], self.beside[some]
        for diagonal, side in entries.unbind(dim=1):
            torch.mul(images, value, out=by_head[0])
            torch.sum(torch.mul(images, deviations, out=by_head[2]), dim=2, out=coefficients[:, inner:])
            torch.bmm(inside, coefficients, out=combined)
            torch.sum(torch.mul(coefficients, combined, out=product), dim=1, keepdim=True, out=diagonal)
            diagonal.mul_(inverse)
            before.addcmul_(vector, factor * diagonal, value=-1)
            if self.outputs is None:
                heads = before.unflatten(1, split)
                heads.addcmul_(by_head[1], value * factor[:, None])
                heads.addcmul_(deviations, (combined[:, inner:] * factor)[:, :, None])
            else:
                torch.mul(by_head[1], value, out=by_head[2]).addcmul_(deviations, combined[:, inner:, None])
                before.addcmul_(self.outputs @ product[:, :inner], factor)
            vector, before = before, vector
            torch.bmm(onto, vector, out=image)
            seen = image if self.outputs is None else vector
            torch.sum(torch.mul(seen, vector, out=product[:, : seen.shape[1]]), dim=1, keepdim=True, out=side)
            _measure(side, inverse, factor, diagonal.abs().add_(beside))
            beside.copy_(side)

    def _take(self, *like: Tensor) -> list[Tensor]:
        """Scratch memory, with anything in it: coefficients and their combinations, and products."""
        inside, image = like
        shape = (len(image), inside.shape[1], image.shape[2])
        size = math.prod(shape)
        if 3 * size > len(self._scratch):
            self._scratch = self._scratch.new_empty(3 * size)
        return [part.view(shape) for part in self._scratch[: 3 * size].split(size)]

    def keep(self, row: Int[Tensor, " segment"], at: Places) -> None:
        """Goes on with some pairs alone, in new segments."""
        self.row = row
        (self.value,) = taken([self.value], at)
        for names in (("deviation", "image"), ("vector", "before"), ("inverse", "factor", "beside")):
            kept = taken([getattr(self, name) for name in names], at)
            for name, part in zip(names, kept, strict=True):
                setattr(self, name, part)


def _turned(
    start: Float[Tensor, "2 rank 1"],
    outputs: Float[Tensor, "rank inner"],
    values: Float[Tensor, "inner dim"],
    inside: bool,
) -> Float[Tensor, "rank 1"]:
    """A start with more of the directions that the value path makes large, as most blocks do: fewer steps find them."""
    values = values / values.abs().amax().clamp_min(torch.finfo(values.dtype).tiny)
    found = values @ (values.mT @ (outputs.mT @ start[0]))
    return _unit(found if inside else outputs @ found) + SPREAD * _unit(start[1])


def _unit(vector: Float[Tensor, "rank 1"]) -> Float[Tensor, "rank 1"]:
    return vector / torch.linalg.vector_norm(vector).clamp_min(torch.finfo(vector.dtype).tiny)


def _sees_all(outputs: Float[Tensor, "rank inner"]) -> bool:
    """Whether the inner product is sound in all directions; the rows of ``outputs`` are orthogonal."""
    sizes = torch.linalg.vector_norm(outputs, dim=1)
    large = len(outputs) == outputs.shape[1] > SMALL
    return large and bool(sizes.amin() > torch.finfo(sizes.dtype).eps ** FLAT * sizes.amax())


def _measure(side: Tensor, inverse: Tensor, factor: Tensor, size: Tensor) -> None:
    r"""From the squared length of the new vectors the entry :math:`\beta_k`, and what the next step needs, in place.

    An exhausted space leaves rounding noise: from there on zeros, and the Ritz values stay exact.
    """
    growth = side * inverse
    inverse.copy_(side).reciprocal_()
    torch.sqrt(growth, out=side).div_(factor.abs())
    ended = (side > size.mul_(NOISE * torch.finfo(side.dtype).eps)).logical_not_()  # also where that is no number
    factor.div_(growth).neg_()
    for part in (side, inverse, factor):
        part.masked_fill_(ended, 0.0)
