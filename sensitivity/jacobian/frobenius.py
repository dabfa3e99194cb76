"""Frobenius norms of a tile of attention blocks, from one inner product per head pair."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.jacobian.geometry import Features, Geometry
from sensitivity.jacobian.query_rows import Rows

EXPLICIT = 2**19  # numbers that the explicit deviations of some blocks may hold at a time
BRACKETS = 2**22  # numbers in the brackets of some rows and keys
KEPT = 2**25  # numbers that the features of all keys may hold for good


class Columns:
    """The features of every key of some samples, kept where they fit.

    Args:
        geometry: the layer's token-independent inner products.
        value: the (centred) values.
    """

    def __init__(self, geometry: Geometry, value: Float[Tensor, "sample head key value_width"]) -> None:
        self.geometry, self.value = geometry, value
        heads, width = value.shape[1], value.shape[3]
        per_key = value.shape[0] * heads * (width + 2 + (heads - 1) * (width + 1))
        self._all = geometry.columns(value) if per_key * value.shape[2] <= KEPT else None
        squares = geometry.value_squares(value) if self._all is None else self._all.squares
        self.largest = squares.amax(dim=3, keepdim=True)

    def parts(self, rows: int) -> Iterator[tuple[slice, Features]]:
        """Some keys at a time, so that their brackets with ``rows`` rows stay in cache."""
        samples, heads, length, _ = self.value.shape
        step = max(1, BRACKETS // (samples * rows * heads * (heads + 1) // 2))
        step = -(-length // -(-length // step))  # parts of one size
        for low in range(0, length, step):
            keys = slice(low, min(low + step, length))
            if self._all is None:
                yield keys, self.geometry.columns(self.value[:, :, keys])
            else:
                yield keys, Features(*(part[..., keys] for part in self._all))


class Brackets:
    """The brackets of every head pair over a tile: inner products of a row's features with a key's.

    Args:
        columns: the features of every key.
        rows: the query rows.
    """

    def __init__(self, columns: Columns, rows: Rows) -> None:
        self.geometry, self.columns, self.rows = columns.geometry, columns, rows

    def norms(self, value_path: bool = True) -> Float[Tensor, "sample row key"]:
        """Norms of the value and key paths together, or of the key path alone."""
        rows = self.rows
        squares = rows.weights.new_empty(rows.weights.shape[0], *rows.weights.shape[2:])
        if rows.dropped:
            self._put_explicit(squares, torch.ones_like(squares, dtype=torch.bool), value_path)
            return root(squares)
        features = self.geometry.rows(rows.query, rows.mean, value_path)
        for keys, columns in self.columns.parts(squares.shape[1]):
            own, cross = _product(features.own, columns.own), _product(features.cross, columns.cross)
            _weighted_sum(own, cross, rows.weights[..., keys].unbind(dim=1), squares[..., keys])
        cancelled = self._cancelled(squares, features)
        if cancelled is not None:
            self._put_explicit(squares, cancelled, value_path)
        return root(squares)

    def head_norms(self) -> Float[Tensor, "sample head row key"]:
        """Norms of every head's value and key paths together."""
        rows, weights = self.rows, self.rows.weights
        squares, cancelled = torch.empty_like(weights), torch.ones_like(weights, dtype=torch.bool)
        if not rows.dropped:
            features = self.geometry.rows(rows.query, rows.mean)
            lost = _lost(weights.dtype) * self._sizes(features).square()
            for keys, columns in self.columns.parts(weights.shape[2]):
                brackets = _product(features.own, columns.own).movedim(0, 1)
                torch.lt(brackets, lost, out=cancelled[..., keys])
                torch.mul(brackets, weights[..., keys].square(), out=squares[..., keys])
        for head, where in enumerate(cancelled.unbind(dim=1)):
            self._put_explicit(squares[:, head], where, heads=slice(head, head + 1))
        return root(squares)

    def value_norms(self) -> Float[Tensor, "sample row key"]:
        r""":math:`\|\sum_h \alpha^h_{ij} M_h\|_F`, from a root of the Gram matrix of the :math:`M_h`."""
        alpha = self.rows.alpha
        values, vectors = torch.linalg.eigh(self.geometry.values)
        mixed = ((vectors * values.clamp_min(0).sqrt()).mT @ alpha.flatten(2)).unflatten(2, alpha.shape[2:])
        squares = mixed[:, 0].square()
        for head in range(1, mixed.shape[1]):
            squares.addcmul_(mixed[:, head], mixed[:, head])
        return squares.sqrt_()

    def _cancelled(self, squares: Tensor, features: Features) -> Bool[Tensor, "sample row key"] | None:
        """Which blocks are so small beside the terms of their brackets that rounding has eaten their digits."""
        weights, sizes, lost = self.rows.weights, self._sizes(features), _lost(squares.dtype)
        # the largest of the heads' sizes bounds the sum below, at a fraction of its passes over the weights
        bound = functools.reduce(torch.add, weights.unbind(dim=1)) * (lost**0.5 * sizes.amax(dim=1))
        if not bound.numel() or not bool(bound.square_().sub_(squares).amax() > 0):
            return None
        scale = torch.zeros_like(squares)
        for head in range(weights.shape[1]):
            term = weights[:, head] * sizes[:, head]
            scale.addcmul_(term, term)
        return squares < scale.mul_(lost)

    def _sizes(self, features: Features) -> Float[Tensor, "sample head row 1"]:
        """What a unit of each head's weight adds to a block's norm before anything cancels."""
        omega = features.own[..., -1:]
        return (omega * (features.squares + self.columns.largest)).sqrt_().movedim(0, 1)

    def _put_explicit(
        self, squares: Tensor, where: Tensor, value_path: bool = True, heads: slice = slice(None)
    ) -> None:
        """Computes the marked blocks from their deviations, some at a time."""
        rows, geometry = self.rows, self.geometry.only(heads)
        value, mean, query = (part[:, heads] for part in (rows.source.value, rows.mean, rows.query))
        places = where.nonzero()
        step = max(1, EXPLICIT // (value.shape[1] * value.shape[-1]))
        for low in range(0, len(places), step):
            sample, row, key = places[low : low + step].unbind(dim=-1)
            alpha, weight = rows.alpha[sample, heads, row, key].mT, rows.weights[sample, heads, row, key].mT
            deviation = alpha[..., None] * value[sample, :, key].movedim(0, 1)
            deviation = deviation - weight[..., None] * mean[sample, :, row].movedim(0, 1)
            there = query[sample, :, row].movedim(0, 1)
            squares[sample, row, key] = geometry.explicit(there, alpha, deviation, value_path)


def _product(rows: Tensor, columns: Tensor) -> Float[Tensor, "pair sample row key"]:
    """The brackets of every pair of heads: one matrix product each."""
    return torch.bmm(rows.flatten(0, 1), columns.flatten(0, 1)).unflatten(0, rows.shape[:2])


def _weighted_sum(own: Tensor, cross: Tensor, weights: tuple[Tensor, ...], out: Tensor) -> None:
    r""":math:`\sum_{h \le g} a^h a^g \langle\cdot,\cdot\rangle^{hg}`, head by head and in place; uses up ``own``."""
    pair = 0
    for head, weight in enumerate(weights):
        inner = own[head].mul_(weight)
        for other in weights[head + 1 :]:
            inner.addcmul_(cross[pair], other)
            pair += 1
        if head == 0:
            torch.mul(inner, weight, out=out)
        else:
            out.addcmul_(inner, weight)


def _lost(dtype: torch.dtype) -> float:
    """Smallest square, relative to what was subtracted to get it, that keeps enough digits."""
    precision = torch.finfo(dtype).eps
    return max(precision**0.3 if dtype == torch.float64 else 0.0, 1e4 * precision)  # 1e-11 left, or 1e-4


def root(square: Tensor) -> Tensor:
    """Square root; rounding may leave a tiny negative square where a norm is zero."""
    return square.clamp_min_(0).sqrt_()
