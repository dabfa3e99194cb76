r"""Statistics of sensitivity maps and attention weights: sinks, parroting, profiles over lag and position.

A map :math:`S_{ij}` is the mean over samples of :math:`\|J_{ij}\|`, pair by pair, over the samples in which the pair is
visible. Each statistic is that of the mean map; the statistics of every sample's own map come with it, for resampling.
Pairs that are not visible are left out of every sum and every count: they are never taken as zeros.

Everything is accumulated row by row (:class:`RowStatistics`, :class:`AttentionStatistics`), so that a long sequence is
summed up without its map; the one-shot functions feed the same accumulators.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.statistics.maps import MapStatistics, RowStatistics, shares
from sensitivity.statistics.statistic import Statistic
from sensitivity.statistics.weights import AttentionStatistics

__all__ = [
    "AttentionStatistics",
    "MapStatistics",
    "RowStatistics",
    "Statistic",
    "diagonal_attention",
    "key_sink",
    "lag_profile",
    "mean_map",
    "parroting_index",
    "path_shares",
    "primacy_profile",
    "row_entropy",
    "shares",
    "sink_ratio",
]


def mean_map(
    norms: Float[Tensor, "sample query key"], visible: Bool[Tensor, "sample query key"] | None = None
) -> Float[Tensor, "query key"]:
    """Mean over the samples in which a pair is visible; NaN where it is visible in none."""
    visible = torch.ones_like(norms, dtype=torch.bool) if visible is None else visible
    return torch.where(visible, norms, 0.0).sum(dim=0) / visible.sum(dim=0)


def sink_ratio(norms: Tensor, visible: Tensor | None = None, diagonal: Tensor | None = None) -> Statistic:
    r""":math:`\mathrm{mean}_i S_{ii} / \mathrm{mean}_{i \ne j} S_{ij}`; null 1.

    Args:
        norms: ``(sample, query, key)``.
        visible: the pairs that count, ``(sample, query, key)``; all unless given.
        diagonal: diagonal norms that replace those of the map, ``(sample, query)``: the residual-removed form.

    Returns:
        NaN with a note where no pair off the diagonal is visible (T = 1); infinite where all of them are exactly zero.

    Raises:
        InputError: a map that is not square, or a visible norm that is not finite.

    Examples:
        >>> sink_ratio(torch.full((1, 4, 4), 0.5) + torch.eye(4))
        Statistic(3, null=1, excess=2)
    """
    return RowStatistics.of(norms, visible, diagonal).sink_ratio(diagonal is not None)


def parroting_index(norms: Tensor, visible: Tensor | None = None, diagonal: Tensor | None = None) -> Statistic:
    r"""Mean over rows of :math:`S_{ii} / \sum_j S_{ij}`, in [0, 1]; null: 1 / number of visible keys, row by row.

    Arguments and errors as in :func:`sink_ratio`; ``.rows`` holds the shares by query. Rows of zeros have no share and
    are left out; at T = 1 the index is 1, and so is its null.
    """
    return RowStatistics.of(norms, visible, diagonal).parroting_index(diagonal is not None)


def lag_profile(
    norms: Tensor, visible: Tensor | None = None, diagonal: Tensor | None = None, *, per_sample: bool = False
) -> Tensor:
    r"""Mean of :math:`S_{ij}` over :math:`i - j = \tau`, :math:`\tau = -(T-1) \dots T-1`: ``(lag,)``, of length 2T-1.

    Arguments and errors as in :func:`sink_ratio`; NaN where no pair of that lag is visible. ``per_sample`` gives
    ``(sample, lag)``.
    """
    profile = RowStatistics.of(norms, visible, diagonal).lag_profile(diagonal is not None)
    return profile[1:] if per_sample else profile[0]


def primacy_profile(
    norms: Tensor, visible: Tensor | None = None, diagonal: Tensor | None = None, *, per_sample: bool = False
) -> Tensor:
    r"""Mean of :math:`S_{ij}` over the visible queries :math:`i` of each key :math:`j`: ``(key,)``.

    Arguments as in :func:`sink_ratio`; maps need not be square. ``per_sample`` gives ``(sample, key)``.
    """
    profile = RowStatistics.of(norms, visible, diagonal).primacy_profile(diagonal is not None)
    return profile[1:] if per_sample else profile[0]


def diagonal_attention(weights: Tensor, attended: Tensor | None = None) -> Statistic:
    r"""Mean weight on the diagonal, :math:`\mathrm{mean}_i a_{ii}`, over samples and heads.

    Args:
        weights: attention weights before dropout, ``(sample, head, query, key)``.
        attended: the pairs that the mask lets attend, broadcastable to the weights; all unless given. A row without an
            attended key (a padded query) is left out.

    Returns:
        The null is the mean of 1 / number of attended keys, 0 in rows whose diagonal is hidden.

    Raises:
        InputError: a row that does not sum to 1 (weights after dropout do not), or weights that are not square.
    """
    return AttentionStatistics.of(weights, attended).diagonal()


def key_sink(weights: Tensor, attended: Tensor | None = None) -> Statistic:
    r"""Largest mass that one key draws, :math:`\max_j \mathrm{mean}_i a_{ij}`, and ``.where`` it lies.

    The null is the same maximum under uniform weights. Arguments and errors as in :func:`diagonal_attention`.
    """
    return AttentionStatistics.of(weights, attended).key_sink()


def row_entropy(weights: Tensor, attended: Tensor | None = None) -> Statistic:
    r"""Mean of :math:`-\sum_j a_{ij} \log a_{ij} / \log(\text{visible keys})`: 1 for uniform rows, 0 for one-hot rows.

    Rows with a single visible key are left out. Arguments and errors as in :func:`diagonal_attention`.
    """
    return AttentionStatistics.of(weights, attended).entropy()


def path_shares(paths: Mapping[str, Tensor], visible: Tensor | None = None) -> dict[str, dict[str, Statistic]]:
    """Share of each path in the sensitivity on and off the diagonal.

    The share of a path is its mean norm over the sum of the paths' mean norms. Norms of paths do not add up to the norm
    of their sum, so the shares compare sizes and say nothing of how the paths cancel.

    Args:
        paths: norms of each path's blocks, ``(sample, query, key)``, by name.
        visible: the pairs that count; all unless given.

    Returns:
        ``{"diagonal": {path: share}, "off_diagonal": {path: share}}``; NaN where all paths are zero or no pair is
        visible.

    Raises:
        InputError: no paths, or maps that are not square.
    """
    return shares({name: RowStatistics.of(norms, visible) for name, norms in paths.items()})
