"""Whole maps, put together from tiles."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from sensitivity.collecting.masks import Masks, take_padding
from sensitivity.collecting.sums import weight_sums
from sensitivity.jacobian.closed_form import Tile
from sensitivity.jacobian.norms import NormMaps
from sensitivity.statistics import AttentionStatistics

Weights: TypeAlias = Literal["keep", "sum", "leave"]  # what is done with attention weights


class KeptMaps:
    """Maps and masks of the rows that are measured, each held once.

    Args:
        masks: which pairs count.
        times: the query times that will be handed in, in their order; all unless given.
        weights: what is done with attention weights: ``keep`` them, ``sum`` them up, or ``leave`` them.

    Attributes:
        maps: the maps; padded pairs are NaN.
        attended: the pairs that the mask lets attend; None where all do.
        visible: the pairs that count; None where all do.
        weight_sums: statistics of the attention weights, where those are not kept.
    """

    def __init__(self, masks: Masks, times: Int[Tensor, " row"] | None = None, weights: Weights = "keep") -> None:
        self.masks, self.times, self.weights = masks, times, weights
        self.order = torch.arange(masks.queries) if times is None else times.cpu()
        self.maps: NormMaps | None = None
        self.attended: Tensor | None = None
        self.visible: Tensor | None = None
        self.weight_sums: AttentionStatistics | None = None
        self._place: Tensor | None = None  # of a query time in the order, where that is not its own
        if times is not None:
            self._place = torch.full((masks.queries,), -1)
            self._place[self.order] = torch.arange(len(self.order))

    def add(self, tile: Tile) -> None:
        """Takes some rows of some samples; the rows stand next to one another in the order."""
        maps, samples = tile.maps, tile.samples
        start = int(tile.rows[0])
        if self._place is not None:
            start = int(self._place[start])
        rows = slice(start, start + len(tile.rows))
        kept = self.maps = self.maps or self._empty(maps)
        padded = self.masks.padded(samples, tile.rows)
        kept.total[samples, rows] = take_padding(maps.total, padded)
        for name, values in maps.paths.items():
            kept.paths[name][samples, rows] = take_padding(values, padded)
        if kept.heads is not None and maps.heads is not None:
            kept.heads[samples, :, rows] = take_padding(maps.heads, padded)
        if kept.diagonal is not None and maps.diagonal is not None:
            own = None if padded is None else padded.all(dim=-1)
            kept.diagonal[samples, rows] = maps.diagonal if own is None else maps.diagonal.masked_fill(own, torch.nan)
        attended, visible = self.masks.of(samples, tile.rows)
        if visible is not None:
            self._put_masks(samples, rows, attended, visible)
        if maps.attention is not None and self.weights != "leave":
            self._put_weights(tile, rows, attended)

    def take(self, maps: NormMaps) -> None:
        """Takes all rows of all samples at once, without a copy."""
        every = slice(0, self.masks.samples)
        order = self.order.to(maps.total.device)
        padded = self.masks.padded(every, order)
        if padded is not None:
            maps.total.masked_fill_(padded, torch.nan)
            if maps.diagonal is not None:
                maps.diagonal = maps.diagonal.masked_fill(padded.all(dim=-1), torch.nan)
        self.maps = maps
        self.attended, self.visible = self.masks.of(every, order)

    def finish(self) -> None:
        """Holds two masks that are the same once."""
        attended, visible = self.attended, self.visible
        if attended is None or visible is None or (*attended.shape[:2], visible.shape[0]) != (1, 1, 1):
            return
        if torch.equal(attended[:, 0], visible):
            self.visible = attended[:, 0]

    def _empty(self, like: NormMaps) -> NormMaps:
        shape = (self.masks.samples, len(self.order), self.masks.keys)
        heads = 0 if like.attention is None else like.attention.shape[1]

        def empty(*lead: int) -> Tensor:
            return like.total.new_empty(shape[0], *lead, *shape[1:])

        return NormMaps(
            total=empty(),
            diagonal=None if like.diagonal is None else like.total.new_empty(shape[:2]),
            paths={name: empty() for name in like.paths},
            heads=None if like.heads is None else empty(like.heads.shape[1]),
            attention=empty(heads) if heads and self.weights == "keep" else None,
        )

    def _put_masks(self, samples: slice, rows: slice, attended: Tensor | None, visible: Tensor) -> None:
        each = self.masks.of_each_sample
        lead, here = (self.masks.samples, samples) if each else (1, slice(0, 1))
        if self.visible is None:
            self.visible = visible.new_empty(lead, len(self.order), self.masks.keys)
        self.visible[here, rows] = visible
        if attended is not None:
            if self.attended is None:
                self.attended = attended.new_empty(lead, attended.shape[1], len(self.order), self.masks.keys)
            self.attended[here, :, rows] = attended

    def _put_weights(self, tile: Tile, rows: slice, attended: Tensor | None) -> None:
        assert self.maps is not None
        assert tile.maps.attention is not None
        if self.maps.attention is not None:
            self.maps.attention[tile.samples, :, rows] = tile.maps.attention
            return
        if self.weight_sums is None:
            self.weight_sums = weight_sums(self.masks, tile.maps.attention.shape[1], self.times)
        self.weight_sums.update(tile.rows, tile.maps.attention, attended, samples=tile.samples)
