"""The sums behind the statistics of a map, taken from tiles as they stream by."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from sensitivity.collecting.masks import Masks
from sensitivity.jacobian.closed_form import Tile
from sensitivity.statistics import AttentionStatistics, RowStatistics


class KeptSums:
    """Sums over the rows of a map, of the map of every path and head, and of attention weights; never a map.

    Args:
        masks: which pairs count.
        times: the query times that will be handed in; all unless given.

    Attributes:
        whole: of the whole map.
        paths: by path.
        heads: by head.
        weights: of the attention weights, where there are any.
    """

    def __init__(self, masks: Masks, times: Int[Tensor, " row"] | None = None) -> None:
        self.masks, self.times = masks, times
        self.whole = self._sums()
        self.paths: dict[str, RowStatistics] = {}
        self.heads: list[RowStatistics] = []
        self.weights: AttentionStatistics | None = None

    def add(self, tile: Tile) -> None:
        """Takes some rows of some samples."""
        maps, rows, samples = tile.maps, tile.rows, tile.samples
        attended, visible = self.masks.of(samples, rows)
        among = self.masks.among(rows)
        self.whole.update(rows, maps.total, visible, maps.diagonal, samples=samples, among=among)
        for name, norms in maps.paths.items():
            self.paths.setdefault(name, self._sums()).update(rows, norms, visible, samples=samples, among=among)
        if maps.heads is not None:
            self.heads = self.heads or [self._sums() for _ in range(maps.heads.shape[1])]
            for head, sums in enumerate(self.heads):
                sums.update(rows, maps.heads[:, head], visible, samples=samples, among=among)
        if maps.attention is not None:
            if self.weights is None:
                self.weights = weight_sums(self.masks, maps.attention.shape[1], self.times)
            self.weights.update(rows, maps.attention, attended, samples=samples)

    def _sums(self) -> RowStatistics:
        return RowStatistics(self.masks.samples, self.masks.queries, self.masks.keys, self.times)


def weight_sums(masks: Masks, heads: int, times: Int[Tensor, " row"] | None) -> AttentionStatistics:
    """Sums over attention weights, still empty."""
    return AttentionStatistics(masks.samples, heads, masks.queries, masks.keys, times)
