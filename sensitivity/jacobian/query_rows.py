"""The rows of an attention layer that a tile needs: weights, weighted means, covariances."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention

OUTER = 2**24  # numbers in the table of value-key products that a covariance may hold at a time


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
        value, key = self.source.value, self.source.key
        value_width, width, length = value.shape[-1], key.shape[-1], key.shape[-2]
        step = max(1, min(value_width, OUTER // (key.shape[0] * key.shape[1] * length * width)))
        parts = []
        for low in range(0, value_width, step):
            outer = value[..., low : low + step, None] * key[..., None, :]
            part = self.alpha @ outer.flatten(-2)
            parts.append(part.unflatten(-1, (outer.shape[-2], width)))
        keys = self.weights @ key
        return torch.cat(parts, dim=-2) - self.mean[..., :, None] * keys[..., None, :]

    def diagonal_blocks(
        self, attention: SoftmaxAttention
    ) -> tuple[Float[Tensor, "sample head row out dim"], Float[Tensor, "sample row out dim"]]:
        """Diagonal blocks of every head without the residual, and the query path of all heads together."""
        w_o = attention.output_weight
        at = self.index[None, None, :, None]
        weight = self.weights.gather(-1, at.expand(*self.weights.shape[:2], -1, 1))
        alpha = self.alpha.gather(-1, at.expand(*self.alpha.shape[:2], -1, 1))
        value = self.source.value[:, :, self.index]
        deviation = alpha * value - weight * self.mean
        gradient = attention.scale * self.query @ attention.key_weight
        query = attention.scale * self.covariance() @ attention.query_weight[:, None]
        inner = alpha[..., None] * attention.value_weight[:, None] + deviation[..., None] * gradient[..., None, :]
        query = w_o[:, None] @ query
        return w_o[:, None] @ inner + query, query.sum(dim=1)


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

    def only(self, head: int) -> RowSource:
        """One head alone."""
        alone = copy.copy(self)
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
