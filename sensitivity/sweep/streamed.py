"""The record of a layer at one length from sums alone, where the maps are not wanted or would not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.collecting import KeptSums, Masks, choose_rows
from sensitivity.jacobian import closed_form
from sensitivity.jacobian.norms import Norm
from sensitivity.statistics import AttentionStatistics, RowStatistics
from sensitivity.sweep.record import OFF_PATHS, ON_PATHS, Record
from sensitivity.sweep.sums import LayerSums, of_rows, of_weights, profiles_of


class StreamedSums(LayerSums):
    """Holds no map, and of the batches their sums.

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
        super().__init__(name, length, norm, bounds)
        self.times = None if isinstance(rows, int) and rows >= length else choose_rows(rows, length, seed)
        self._parts: list[KeptSums] = []

    def _measure(self, attention: SoftmaxAttention, tokens: Float[Tensor, "sample time dim"]) -> None:
        kept = KeptSums(Masks(len(tokens), self.length, self.length, attention), self.times)
        rows = None if self.times is None else self.times.to(tokens.device)
        for tile in closed_form.tiles(attention, tokens, norm=self.norm, paths=True, rows=rows):
            kept.add(tile)
        self._parts.append(kept)

    def finish(self) -> Record:
        """The statistics of everything so far.

        Raises:
            InputError: batches whose sequences see different pairs.
        """
        whole = RowStatistics.merged([part.whole for part in self._parts])
        weights = AttentionStatistics.merged([part.weights for part in self._parts if part.weights is not None])
        paths = {name: RowStatistics.merged([part.paths[name] for part in self._parts]) for name in ON_PATHS}
        found = of_rows(whole, whole.has_removed)
        found |= {f"off_diagonal_{name}": paths[name].off_diagonal() for name in OFF_PATHS}
        found |= {f"diagonal_{name}": paths[name].diagonal() for name in ON_PATHS}
        found |= of_weights(weights)
        return self._record(found, profiles_of(whole, whole.has_removed), {})
