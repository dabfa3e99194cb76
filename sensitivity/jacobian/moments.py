"""Weighted second moments of values and keys, for many rows of weights as one matrix product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

KEPT = 3 * 2**25  # numbers that the table of products may hold for good
PART = 2**20  # numbers in a part of it that is built, used and dropped


class Moments(NamedTuple):
    r"""Sums over keys under some rows of weights, rows on the last axis.

    Attributes:
        second: :math:`\sum_l a_{il} x_l y_l^T`.
        left: :math:`\sum_l a_{il} x_l`.
        right: :math:`\sum_l a_{il} y_l`.
    """

    second: Float[Tensor, "sample head left right row"]
    left: Float[Tensor, "sample head left row"]
    right: Float[Tensor, "sample head right row"]


class Products:
    """The table of the products of two vectors per key, of which every moment is a weighted sum over keys.

    Where both vectors are the same, the products above the diagonal are left out: half the work.

    Args:
        left: :math:`x_l`.
        right: :math:`y_l`; None where it is :math:`x_l` again.
        by_row: whether the moments of a row lie next to one another in memory, or one moment of all rows; where both
            vectors are the same it is the latter.
    """

    def __init__(
        self,
        left: Float[Tensor, "sample head key left"],
        right: Float[Tensor, "sample head key right"] | None = None,
        by_row: bool = False,
    ) -> None:
        self.left, self.right, self.by_row = left.mT, None if right is None else right.mT, by_row
        self._table: Tensor | None = None

    def moments(self, weights: Float[Tensor, "sample head row key"]) -> Moments:
        """The moments under ``weights``."""
        summed = self._summed(weights)
        if self.right is not None:
            sizes = (self.left.shape[2] * self.right.shape[2], self.left.shape[2], self.right.shape[2])
            second, left, right = summed.split(sizes, dim=2)
            return Moments(second.unflatten(2, sizes[1:]), left, right)
        width = self.left.shape[2]
        left = summed[:, :, -width:]
        return Moments(summed.index_select(2, self._places()).unflatten(2, (width, width)), left, left)

    def _summed(self, weights: Tensor) -> Float[Tensor, "sample head product row"]:
        samples, heads, width, length = self.left.shape
        count = width + (width * (width + 1) // 2 if self.right is None else (width + 1) * self.right.shape[2])
        per_key = samples * heads * count
        if per_key * length <= KEPT:
            if self._table is None:
                self._table = self._build(slice(None), count)
            return self._weighted(self._table, weights)
        step = max(1, PART // per_key)
        summed = self._weighted(self._build(slice(0, step), count), weights[..., :step])
        for low in range(step, length, step):
            keys = slice(low, low + step)
            summed += self._weighted(self._build(keys, count), weights[..., keys])
        return summed

    def _weighted(self, table: Tensor, weights: Tensor) -> Float[Tensor, "sample head product row"]:
        return (weights @ table.mT).mT if self.by_row else table @ weights.mT

    def _build(self, keys: slice, count: int) -> Float[Tensor, "sample head product key"]:
        left, right = self.left[..., keys], None if self.right is None else self.right[..., keys]
        if self.by_row:
            assert right is not None
            return _joined(left.mT, right.mT).mT
        table = left.new_empty(*left.shape[:2], count, left.shape[-1])
        if right is not None:
            firsts = left.shape[2]
            products = table[:, :, : firsts * right.shape[2]].unflatten(2, (firsts, -1))
            torch.mul(left[:, :, :, None], right[:, :, None], out=products)
            table[:, :, -firsts - right.shape[2] : -right.shape[2]] = left
            table[:, :, -right.shape[2] :] = right
            return table
        start = 0
        for first in range(left.shape[2]):
            rest = left[:, :, first:]
            torch.mul(left[:, :, first, None], rest, out=table[:, :, start : start + rest.shape[2]])
            start += rest.shape[2]
        table[:, :, start:] = left
        return table

    def _places(self) -> Tensor:
        """Where each entry of the square matrix stands among the products on and below its diagonal."""
        width = self.left.shape[2]
        places = torch.empty(width, width, dtype=torch.long, device=self.left.device)
        first, second = torch.triu_indices(width, width, device=self.left.device)
        places[first, second] = places[second, first] = torch.arange(len(first), device=self.left.device)
        return places.flatten()


def _joined(
    left: Float[Tensor, "sample head key left"], right: Float[Tensor, "sample head key right"]
) -> Float[Tensor, "sample head key product"]:
    """A table in as few steps as there can be, which derivatives go through."""
    products = left[..., None] * right[..., None, :]
    return torch.cat([products.flatten(3), left, right], dim=3)
