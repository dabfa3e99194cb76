"""The rows of an attention layer that a tile needs: weights, weighted means, covariances."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.moments import Moments, Products


@dataclass
class Rows:
    r"""Some query rows of some samples.

    Attributes:
        index: the query times, ``(row,)``.
        query: :math:`q_i`.
        weights: :math:`a_{ij}`, before dropout.
        alpha: :math:`m_{ij} a_{ij}`; the weights themselves where nothing is dropped.
        source: where they come from.
    """

    index: Int[Tensor, " row"]
    query: Float[Tensor, "sample head row width"]
    weights: Float[Tensor, "sample head row key"]
    alpha: Float[Tensor, "sample head row key"]
    source: RowSource

    @property
    def dropped(self) -> bool:
        """Whether a multiplier separates ``alpha`` from ``weights``."""
        return self.source.dropped

    @cached_property
    def moments(self) -> Moments:
        """Sums over keys under ``alpha`` of what the source multiplies."""
        return self.source.products.moments(self.alpha)

    @cached_property
    def mean(self) -> Float[Tensor, "sample head row value_width"]:
        r""":math:`o_i = \sum_l m_{il} a_{il} v_l` of the (centred) values of ``source``."""
        left = self.moments.left.mT
        return left @ self.source.attention.value_weight.mT if self.source.by_token else left

    @cached_property
    def key_mean(self) -> Float[Tensor, "sample head row width"]:
        r""":math:`\sum_l a_{il} k_l` of the centred keys, without the dropout."""
        if self.dropped:
            return self.weights @ self.source.key
        right = self.moments.right.mT
        return right @ self.source.attention.key_weight.mT if self.source.by_token else right

    def covariance(self) -> Float[Tensor, "sample head value_width width row"]:
        r""":math:`\sum_l a_{il} (m_{il} v_l - o_i) k_l^T` of every row, on centred keys (a shift cancels)."""
        if self.source.by_token:
            attention = self.source.attention
            return torch.einsum(
                "hvd,shder,hwe->shvwr", attention.value_weight, self.token_covariance(), attention.key_weight
            )
        mean, key_mean = self.mean.mT[:, :, :, None], self.key_mean.mT[:, :, None]
        return torch.addcmul(self.moments.second, mean, key_mean, value=-1)

    def token_covariance(self) -> Float[Tensor, "sample head dim dim row"]:
        """Covariance of the tokens under the weights of every row, where the source multiplies tokens."""
        second, left, _ = self.moments
        return torch.addcmul(second, left[:, :, :, None], left[:, :, None], value=-1)


class RowSource:
    """Queries, keys and values of some samples, from which rows are drawn.

    Keys are centred over time, and values too where nothing is dropped: the closed form only sees their differences,
    and large common offsets would cost digits.

    Attributes:
        by_token: whether second moments are taken of tokens, not of values and keys: the products of a token with
            itself are symmetric, so that one wide head has half as many of them.
    """

    def __init__(
        self, attention: SoftmaxAttention, tokens: Float[Tensor, "sample time dim"], samples: slice = slice(None)
    ) -> None:
        self.attention, tokens = attention.sample(samples), tokens[samples]
        self.query, self.raw_key, value = attention.project(tokens)
        self.key = self.raw_key - self.raw_key.mean(dim=-2, keepdim=True)
        self.dropped = attention.multiplier is not None
        self.shift = torch.zeros_like(value[..., :1, :]) if self.dropped else value.mean(dim=-2, keepdim=True)
        self.value = value - self.shift
        dim, products = attention.dim, self.value.shape[-1] * self.key.shape[-1]
        self.by_token = not self.dropped and attention.heads == 1 and dim * (dim + 1) // 2 < products
        if self.by_token:
            self.products = Products((tokens - tokens.mean(dim=1, keepdim=True))[:, None])
        else:
            self.products = Products(self.value, self.key)

    def rows(self, index: Int[Tensor, " row"]) -> Rows:
        """The rows at the query times ``index``."""
        query = self.query[:, :, index]
        weights = self.attention.row_weights(query, self.raw_key, index)
        alpha = weights
        if self.dropped:
            alpha = weights * self.attention.row_multiplier(self.raw_key.shape[-2], index)
        return Rows(index, query, weights, alpha, self)
