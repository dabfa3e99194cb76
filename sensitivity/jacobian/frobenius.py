"""Frobenius norms of a tile of attention blocks, from one inner product per head pair."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.jacobian.geometry import Geometry
from sensitivity.jacobian.query_rows import Rows

EXPLICIT = 2**19  # numbers that the explicit deviations of some blocks may hold at a time


class Brackets:
    """The brackets of every head pair over a tile: inner products of a row's features with a key's.

    Args:
        geometry: the layer's token-independent inner products.
        columns: the features of every key, from ``geometry.columns``.
        rows: the query rows.
    """

    def __init__(self, geometry: Geometry, columns: Float[Tensor, "sample pair key features"], rows: Rows) -> None:
        self.geometry, self.columns, self.rows = geometry, columns, rows

    def norms(self, value_path: bool = True) -> Float[Tensor, "sample row key"]:
        """Norms of the value and key paths together, or of the key path alone."""
        rows = self.rows
        total = self.columns.new_zeros(rows.weights.shape[0], *rows.weights.shape[2:])
        if rows.dropped:
            self._put_explicit(total, torch.ones_like(total, dtype=torch.bool), value_path)
            return root(total)
        pairs = self.geometry.rows(rows.query, rows.mean, value_path) @ self.columns.mT
        heads, start = rows.weights.shape[1], 0
        for head in range(heads):  # the pairs of one first head stand together
            with_others = pairs[:, start : start + heads - head].mul_(rows.weights[:, head:]).sum(dim=1)
            total.addcmul_(with_others, rows.weights[:, head])
            start += heads - head
        self._put_explicit(total, self._cancelled(total), value_path)
        return root(total)

    def head_norms(self) -> Float[Tensor, "sample head row key"]:
        """Norms of every head's value and key paths together."""
        return (
            torch.cat([self._only(head).norms() for head in range(self.rows.weights.shape[1])], dim=0)
            .unflatten(0, (self.rows.weights.shape[1], -1))
            .movedim(0, 1)
        )

    def value_norms(self) -> Float[Tensor, "sample row key"]:
        r""":math:`\|\sum_h \alpha^h_{ij} M_h\|_F`, from a root of the Gram matrix of the :math:`M_h`."""
        geometry, alpha = self.geometry, self.rows.alpha
        gram = geometry.values.new_zeros(alpha.shape[1], alpha.shape[1])
        gram[geometry.first, geometry.second] = gram[geometry.second, geometry.first] = geometry.values
        values, vectors = torch.linalg.eigh(gram)
        mixed = (vectors * values.clamp_min(0).sqrt()).mT @ alpha.flatten(2)
        return torch.linalg.vector_norm(mixed, dim=1).unflatten(1, alpha.shape[2:])

    def _only(self, head: int) -> Brackets:
        own = (self.geometry.first == head) & (self.geometry.second == head)
        return Brackets(self.geometry.only(head), self.columns[:, own], self.rows.only(head))

    def _cancelled(self, squares: Tensor) -> Bool[Tensor, "sample row key"]:
        """Which blocks are so small beside the terms of their brackets that rounding has eaten their digits."""
        geometry, weights, mean = self.geometry, self.rows.weights, self.rows.mean
        own = geometry.first == geometry.second
        mean_square = ((mean @ geometry.outputs[own]) * mean).sum(dim=-1)
        largest = self.columns[:, own, :, -1].amax(dim=-1, keepdim=True)
        sizes = (geometry.products(self.rows.query)[:, own, :, 0] * (mean_square + largest)).sqrt_()
        scale = torch.zeros_like(squares)
        for head in range(weights.shape[1]):
            term = weights[:, head] * sizes[:, head, :, None]
            scale.addcmul_(term, term)
        precision = torch.finfo(squares.dtype).eps
        lost = max(precision**0.5, 1e4 * precision)
        return squares < scale.mul_(lost)

    def _put_explicit(self, squares: Tensor, where: Tensor, value_path: bool) -> None:
        """Computes the marked blocks from their deviations, some at a time."""
        rows, value = self.rows, self.rows.source.value
        places = where.nonzero()
        step = max(1, EXPLICIT // (value.shape[1] * value.shape[-1]))
        for low in range(0, len(places), step):
            sample, row, key = places[low : low + step].unbind(dim=-1)
            alpha, weight = rows.alpha[sample, :, row, key].mT, rows.weights[sample, :, row, key].mT
            deviation = alpha[..., None] * value[sample, :, key].movedim(0, 1)
            deviation = deviation - weight[..., None] * rows.mean[sample, :, row].movedim(0, 1)
            query = rows.query[sample, :, row].movedim(0, 1)
            squares[sample, row, key] = self.geometry.explicit(query, alpha, deviation, value_path).sum(dim=0)


def root(square: Tensor) -> Tensor:
    """Square root; rounding may leave a tiny negative square where a norm is zero."""
    return square.clamp_min_(0).sqrt_()
