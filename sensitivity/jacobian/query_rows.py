"""The rows of an attention layer that a tile needs: weights, weighted means, covariances."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention

OUTER = 2**25  # numbers in the table of value-key products that may be held at a time


@dataclass
class Rows:
    r"""Some query rows of some samples.

    Attributes:
        index: the query times, ``(row,)``.
        query: :math:`q_i`.
        weights: :math:`a_{ij}`, before dropout.
        alpha: :math:`m_{ij} a_{ij}`; the weights themselves where nothing is dropped.
        mean: :math:`o_i = \sum_l m_{il} a_{il} v_l` of the (centred) values of ``source``.
        dropped: whether a multiplier is there.
        source: where they come from.
    """

    index: Int[Tensor, " row"]
    query: Float[Tensor, "sample head row width"]
    weights: Float[Tensor, "sample head row key"]
    alpha: Float[Tensor, "sample head row key"]
    mean: Float[Tensor, "sample head row value_width"]
    dropped: bool
    source: RowSource

    def only(self, head: int) -> Rows:
        """The rows of one head alone."""
        here = slice(head, head + 1)
        query, weights, alpha, mean = (part[:, here] for part in (self.query, self.weights, self.alpha, self.mean))
        return Rows(self.index, query, weights, alpha, mean, self.dropped, self.source.only(head))

    def covariance(self) -> Float[Tensor, "sample head row value_width width"]:
        r""":math:`\sum_l a_{il} (m_{il} v_l - o_i) k_l^T` of every row, on centred keys (a shift of them cancels)."""
        parts = [self.alpha @ outer for outer in self.source.outer_products()]
        covariance = torch.cat(parts, dim=-1).unflatten(-1, (-1, self.source.key.shape[-1]))
        return covariance - self.mean[..., :, None] * (self.weights @ self.source.key)[..., None, :]

    def diagonal_inner(
        self, attention: SoftmaxAttention
    ) -> tuple[Float[Tensor, "sample row head value_width dim"], Float[Tensor, "sample row head value_width dim"]]:
        r"""Diagonal blocks before :math:`W_O`, without the residual: all paths, and the query path alone."""
        at = self.index[None, None, :, None]
        weight = self.weights.gather(-1, at.expand(*self.weights.shape[:2], -1, 1))
        alpha = self.alpha.gather(-1, at.expand(*self.alpha.shape[:2], -1, 1))
        deviation = alpha * self.source.value[:, :, self.index] - weight * self.mean
        gradient = attention.scale * self.query @ attention.key_weight
        query = self.covariance() @ (attention.scale * attention.query_weight[:, None])
        inner = alpha[..., None] * attention.value_weight[:, None]
        inner.addcmul_(deviation[..., None], gradient[..., None, :]).add_(query)
        return inner.movedim(1, 2), query.movedim(1, 2)


class RowSource:
    """Queries, keys and values of some samples, from which rows are drawn.

    Keys are centred over time, and values too where nothing is dropped: the closed form only sees their differences,
    and large common offsets would cost digits.
    """

    def __init__(
        self, attention: SoftmaxAttention, tokens: Float[Tensor, "sample time dim"], samples: slice = slice(None)
    ) -> None:
        self.attention = attention.sample(samples)
        self.query, self.raw_key, value = attention.project(tokens[samples])
        self.key = self.raw_key - self.raw_key.mean(dim=-2, keepdim=True)
        self.dropped = attention.multiplier is not None
        self.shift = torch.zeros_like(value[..., :1, :]) if self.dropped else value.mean(dim=-2, keepdim=True)
        self.value = value - self.shift
        self._outer: Tensor | None = None

    def outer_products(self) -> Iterator[Float[Tensor, "sample head key products"]]:
        """Products of every value entry with every key entry, in parts that fit; kept where they fit together."""
        if self._outer is not None:
            yield self._outer
            return
        value_width, width, length = self.value.shape[-1], self.key.shape[-1], self.key.shape[-2]
        step = max(1, min(value_width, OUTER // (self.key.shape[0] * self.key.shape[1] * length * width)))
        for low in range(0, value_width, step):
            part = (self.value[..., low : low + step, None] * self.key[..., None, :]).flatten(-2)
            if step == value_width:
                self._outer = part
            yield part

    def only(self, head: int) -> RowSource:
        """One head alone."""
        alone = copy.copy(self)
        alone._outer = None
        here = slice(head, head + 1)
        for name in ("query", "raw_key", "key", "value", "shift"):
            setattr(alone, name, getattr(self, name)[:, here])
        return alone

    def rows(self, index: Int[Tensor, " row"]) -> Rows:
        """The rows at the query times ``index``."""
        query = self.query[:, :, index]
        weights = self.attention.row_weights(query, self.raw_key, index)
        alpha = weights
        if self.dropped:
            alpha = weights * self.attention.row_multiplier(self.raw_key.shape[-2], index)
        centred = alpha @ self.value
        return Rows(index, query, weights, alpha, centred, self.dropped, self)
