"""The rows of an attention layer that a tile needs: weights, weighted means, covariances."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.frames import Frame
from sensitivity.jacobian.moments import Moments, Products

LOST = 1e-2  # a covariance that is smaller than that, beside the means that it is what remains of, has lost digits
DEVIATIONS = 2**22  # numbers in the deviations of rows whose covariances are summed one by one


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
        if not self.source.tabled:
            return self.alpha @ self.source.value
        left, frame = self.moments.left.mT, self.source.by_token
        return left if frame is None else left * frame.values

    @cached_property
    def mean_key(self) -> Float[Tensor, "sample head row width"]:
        r""":math:`\sum_l a_{il} k_l` of the centred keys of ``source``, without the dropout."""
        return self.weights @ self.source.key

    def covariance(self, some: slice = slice(None)) -> Float[Tensor, "sample head value_width width some"]:
        r""":math:`\sum_l a_{il} (m_{il} v_l - o_i) k_l^T` of some rows, on centred keys (a shift cancels)."""
        if not self.source.tabled:
            return self._row_by_row(some)
        second, left, right = (part[..., some] for part in self.moments)
        if self.source.dropped:  # the key's mean is that without the dropout
            right = self.mean_key[:, :, some].mT
        covariance = torch.addcmul(second, left[:, :, :, None], right[:, :, None], value=-1)
        norm = torch.linalg.vector_norm
        lost = norm(norm(covariance, dim=(2, 3)), dim=1) < LOST * norm(norm(left, dim=2) * norm(right, dim=2), dim=1)
        (few,) = lost.any(dim=0).nonzero(as_tuple=True)
        if len(few):  # rows that see one key, or as good as one
            step = max(1, DEVIATIONS // self.source.pair[0].numel())
            for rows in few.split(step):
                covariance[..., rows] = self._row_by_row(rows + (some.start or 0))
        frame = self.source.by_token
        return covariance if frame is None else covariance.mul_((frame.values[:, None] * frame.keys)[..., None])

    def _row_by_row(self, some: slice | Int[Tensor, " some"]) -> Float[Tensor, "sample head value_width width some"]:
        r""":math:`\sum_l (\alpha_{il} x_l - a_{il} \bar x_i) (y_l - \bar y_i)^T`, in which little cancels."""
        left, right = self.source.pair
        weights, alpha = self.weights[:, :, some], self.alpha[:, :, some]
        mean, mean_right = (alpha @ left)[:, :, :, None], (weights @ right)[:, :, :, None]
        deviation = alpha[..., None] * (left[:, :, None] - mean)
        if self.dropped:
            deviation = deviation + (alpha - weights)[..., None] * mean
        return (deviation.mT @ (right[:, :, None] - mean_right)).movedim(2, 4)

    def on_diagonal(
        self,
    ) -> tuple[Float[Tensor, "sample head row 1"], Float[Tensor, "sample head row value_width"]]:
        r""":math:`\alpha_{ii}` and the deviation :math:`\alpha_{ii} v_i - a_{ii} o_i`."""
        at = self.index[None, None, :, None].expand(*self.weights.shape[:2], -1, 1)
        alpha = weight = self.weights.gather(-1, at)
        if self.dropped:
            alpha = self.alpha.gather(-1, at)
        return alpha, alpha * self.source.value[:, :, self.index] - weight * self.mean


class RowSource:
    """Queries, keys and values of some samples, from which rows are drawn.

    Keys are centred over time, and values too where nothing is dropped: the closed form only sees their differences,
    and large common offsets would cost digits.

    Args:
        attention: the layer.
        tokens: its tokens.
        samples: which of the samples.
        frame: the layer's own, to have values and centred keys in the coordinates of that.
        table: whether covariances come from a table of the products of all keys, with the means as a by-product, or
            are summed row by row, for the few rows that want one; then without a frame.
    """

    def __init__(
        self,
        attention: SoftmaxAttention,
        tokens: Float[Tensor, "sample time dim"],
        samples: slice = slice(None),
        frame: Frame | None = None,
        table: bool = True,
    ) -> None:
        self.tabled = table
        self.attention = (attention if frame is None else frame.attention).sample(samples)
        tokens, self.by_token = tokens[samples], None if frame is None else frame.by_token
        self.query, self.raw_key, value = self.attention.project(tokens)
        self.key = self.raw_key - self.raw_key.mean(dim=-2, keepdim=True)
        self.dropped = attention.multiplier is not None
        self.shift = torch.zeros_like(value[..., :1, :]) if self.dropped else value.mean(dim=-2, keepdim=True)
        self.value = value - self.shift
        if self.by_token is not None:
            both = ((tokens - tokens.mean(dim=1, keepdim=True)) @ self.by_token.tokens.mT)[:, None]
            self.pair, self.products = (both, both), Products(both)
            return
        if frame is not None:
            self.key = self.key @ frame.keys.mT
        self.pair = self.value, self.key
        self.products = Products(self.value, self.key, by_row=frame is None)

    def rows(self, index: Int[Tensor, " row"]) -> Rows:
        """The rows at the query times ``index``."""
        query = self.query[:, :, index]
        weights = self.attention.row_weights(query, self.raw_key, index)
        alpha = weights
        if self.dropped:
            alpha = weights * self.attention.row_multiplier(self.raw_key.shape[-2], index)
        return Rows(index, query, weights, alpha, self)
