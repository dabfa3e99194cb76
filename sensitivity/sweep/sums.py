"""What every record of a layer at one length is accumulated by, whether its maps are held or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.norms import Norm
from sensitivity.statistics import AttentionStatistics, RowStatistics, Statistic
from sensitivity.sweep.bounds import BoundSample
from sensitivity.sweep.record import Record
from sensitivity.target import in_one_type


class LayerSums(ABC):
    """Accumulates one layer at one length over batches of sequences.

    Args:
        name: the layer.
        length: time steps.
        norm: of the blocks.
        bounds: bounds to check.
    """

    def __init__(self, name: str, length: int, norm: Norm, bounds: Sequence[str] = ()) -> None:
        self.name, self.length, self.norm = name, length, norm
        self._bounds = BoundSample(bounds, norm)
        self._groups: list[Tensor] = []

    def update(
        self,
        attention: SoftmaxAttention,
        tokens: Float[Tensor, "sample time dim"],
        groups: Int[Tensor, " sample"] | None = None,
    ) -> None:
        """Measures some sequences, tile by tile."""
        attention, tokens = in_one_type(attention, tokens)
        with torch.no_grad():
            self._measure(attention, tokens)
            self._bounds.update(attention, tokens)
        self._groups.append(torch.arange(len(tokens)) if groups is None else groups.cpu())

    @abstractmethod
    def _measure(self, attention: SoftmaxAttention, tokens: Float[Tensor, "sample time dim"]) -> None:
        """Takes in the tiles of some sequences."""

    @abstractmethod
    def finish(self) -> Record:
        """The statistics of everything so far."""

    def _record(self, statistics: dict[str, Statistic], profiles: dict[str, Tensor], maps: dict[str, Tensor]) -> Record:
        groups = torch.cat(self._groups)
        return Record(self.name, self.length, statistics, groups, profiles, maps, self._bounds.finish())


def of_rows(sums: RowStatistics, removed: bool) -> dict[str, Statistic]:
    """The statistics of whole blocks, with the residual path and, where ``removed``, also without it."""
    found = {"off_diagonal": sums.off_diagonal()}
    for form in (False, True)[: 1 + removed]:
        suffix = "_residual_removed" if form else ""
        found[f"diagonal{suffix}"] = sums.diagonal(form)
        found[f"sink_ratio{suffix}"] = sums.sink_ratio(form)
        found[f"parroting_index{suffix}"] = sums.parroting_index(form)
    return found


def of_weights(weights: AttentionStatistics) -> dict[str, Statistic]:
    """The statistics of attention weights."""
    found = {"row_entropy": weights.entropy(), "key_sink": weights.key_sink()}
    return found | {"diagonal_attention": weights.diagonal()}


def profiles_of(sums: RowStatistics, removed: bool) -> dict[str, Tensor]:
    """The profiles over lags and keys, that over lags also without the residual path where ``removed``."""
    found = {"lag": sums.lag_profile()[0], "primacy": sums.primacy_profile()[0]}
    return found | ({"lag_residual_removed": sums.lag_profile(True)[0]} if removed else {})
