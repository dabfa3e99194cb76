"""The sink ratio as something to differentiate: on few sequences, without building a block off the diagonal."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.errors import InputError
from sensitivity.jacobian.diagonal import DiagonalBlocks
from sensitivity.jacobian.geometry import Geometry
from sensitivity.jacobian.query_rows import Rows, RowSource
from sensitivity.jacobian.visibility import attended_and_counted


def log_sink_ratio(
    attention: SoftmaxAttention,
    tokens: Float[Tensor, "sample time dim"],
    residual: Float[Tensor, ""] | None = None,
) -> Float[Tensor, " sample"]:
    r"""Logarithm of the diagonal's root mean square sensitivity over that of the other pairs, with its graph.

    .. math:: \ell = \tfrac12 \log \Big( \frac1T \sum_i \|J_{ii}\|_F^2 \Big)
                   - \tfrac12 \log \Big( \frac1{T(T-1)} \sum_{i \ne j} \|J_{ij}\|_F^2 \Big)

    It is the sink ratio with root mean squares in place of means of norms: smooth, and a sum of inner products that
    the closed form has anyway. Pairs that a mask hides are left out. For H heads of width d on T tokens of D features
    it takes :math:`O(H^2 T^2 d)` operations off the diagonal and :math:`O(T D^2 d H)` on it.

    Args:
        attention: the layer; its weights may carry a graph.
        tokens: they may carry one, too.
        residual: the factor of the residual path where that carries a graph; else that of the layer.

    Raises:
        InputError: fewer than two time steps, or a multiplier on the weights.
    """
    if attention.multiplier is not None:
        raise InputError("the differentiable sink ratio is that of a layer without dropout; leave the multiplier out.")
    length = tokens.shape[1]
    if length < 2:
        raise InputError("the sink ratio compares the diagonal with other pairs, so it needs at least 2 time steps.")
    diagonal = torch.eye(length, dtype=torch.bool, device=tokens.device)
    counted = attended_and_counted(attention, length)[1].expand(len(tokens), -1, -1)
    rows = RowSource(attention, tokens).rows(torch.arange(length, device=tokens.device))
    on = _mean(_diagonal_squares(attention, rows, residual), counted.diagonal(dim1=1, dim2=2))
    off = _mean(_squares(attention, rows), counted & ~diagonal)
    return (on.log() - off.clamp_min(torch.finfo(off.dtype).tiny).log()) / 2


def _squares(attention: SoftmaxAttention, rows: Rows) -> Float[Tensor, "sample query key"]:
    """Squared norms of the value and key paths of every pair."""
    geometry = Geometry.of(attention)
    features, columns = geometry.rows(rows.query, rows.mean), geometry.columns(rows.source.value)
    weights = rows.weights.movedim(1, 0)
    own = (features.own @ columns.own * weights.square()).sum(dim=0)
    cross = features.cross @ columns.cross * weights[geometry.first] * weights[geometry.second]
    return own + cross.sum(dim=0)


def _diagonal_squares(
    attention: SoftmaxAttention, rows: Rows, residual: Tensor | None
) -> Float[Tensor, "sample query"]:
    """Squared norms of the diagonal blocks, all paths together."""
    total = DiagonalBlocks.of(attention, rows).total()
    factor = attention.residual if residual is None else residual
    identity = torch.eye(*total.shape[-2:], dtype=total.dtype, device=total.device)
    return (total + factor * identity).square().sum(dim=(-2, -1))


def _mean(values: Tensor, counted: Tensor) -> Float[Tensor, " sample"]:
    """Mean over the pairs that count, sample by sample."""
    kept = torch.where(counted, values, 0.0).flatten(1).sum(dim=1)
    return kept / counted.flatten(1).sum(dim=1)
