"""The record of a layer at one length from sums alone, where the maps are not wanted or would not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.collecting import KeptSums, Masks, choose_rows
from sensitivity.jacobian import closed_form
from sensitivity.jacobian.norms import Norm
from sensitivity.statistics import AttentionStatistics, RowStatistics, Statistic
from sensitivity.sweep.bounds import BoundSample
from sensitivity.sweep.record import OFF_PATHS, ON_PATHS, Record
from sensitivity.sweep.sums import in_one_type


class StreamedSums:
    """Accumulates one layer at one length over batches of sequences; holds no map, and of the batches their sums.

    Args:
        name: the layer.
        length: time steps.
        norm: of the blocks.
        bounds: bounds to check.
        rows: query rows that are measured: a number (all where there are no more), or query times; all by default.
        seed: of the choice of rows.
    """

    def __init__(
        self, name: str, length: int, norm: Norm, bounds: Sequence[str] = (), rows: Any = None, seed: int = 0
    ) -> None:
        self.name, self.length, self.norm = name, length, norm
        self.times = None if isinstance(rows, int) and rows >= length else choose_rows(rows, length, seed)
        self._bounds = BoundSample(bounds, norm)
        self._parts: list[KeptSums] = []
        self._groups: list[Tensor] = []

    def update(
        self,
        attention: SoftmaxAttention,
        tokens: Float[Tensor, "sample time dim"],
        groups: Int[Tensor, " sample"] | None = None,
    ) -> None:
        """Measures some sequences, tile by tile."""
        attention, tokens = in_one_type(attention, tokens)
        kept = KeptSums(Masks(len(tokens), self.length, self.length, attention), self.times)
        rows = None if self.times is None else self.times.to(tokens.device)
        with torch.no_grad():
            for tile in closed_form.tiles(attention, tokens, norm=self.norm, paths=True, rows=rows):
                kept.add(tile)
            self._bounds.update(attention, tokens)
        self._parts.append(kept)
        self._groups.append(torch.arange(len(tokens)) if groups is None else groups.cpu())

    def finish(self) -> Record:
        """The statistics of everything so far.

        Raises:
            InputError: batches whose sequences see different pairs.
        """
        whole = RowStatistics.merged([part.whole for part in self._parts])
        weights = AttentionStatistics.merged([part.weights for part in self._parts if part.weights is not None])
        paths = {name: RowStatistics.merged([part.paths[name] for part in self._parts]) for name in ON_PATHS}
        found: dict[str, Statistic] = {"off_diagonal": whole.off_diagonal()}
        profiles = {"lag": whole.lag_profile()[0], "primacy": whole.primacy_profile()[0]}
        for removed in (False, True)[: 1 + whole.has_removed]:
            suffix = "_residual_removed" if removed else ""
            found[f"diagonal{suffix}"] = whole.diagonal(removed)
            found[f"sink_ratio{suffix}"] = whole.sink_ratio(removed)
            found[f"parroting_index{suffix}"] = whole.parroting_index(removed)
            profiles[f"lag{suffix}"] = whole.lag_profile(removed)[0]
        found |= {f"off_diagonal_{name}": paths[name].off_diagonal() for name in OFF_PATHS}
        found |= {f"diagonal_{name}": paths[name].diagonal() for name in ON_PATHS}
        found |= {"row_entropy": weights.entropy(), "key_sink": weights.key_sink()}
        found["diagonal_attention"] = weights.diagonal()
        groups = torch.cat(self._groups)
        return Record(self.name, self.length, found, groups, profiles, {}, self._bounds.finish())
