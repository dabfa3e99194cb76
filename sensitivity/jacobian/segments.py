"""Pairs of a tile in segments of one row each, so that the open ones can be packed, whatever rows they are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

WIDTH, NARROW = 64, 32  # most and fewest pairs in a segment: narrower ones are slower to multiply, wider ones idler

Places = tuple[Int[Tensor, "fewer width"], Int[Tensor, "fewer width"]]  # segments, and places in them


@dataclass(frozen=True)
class Segments:
    """Pairs of query rows and keys.

    Attributes:
        row: the row of each segment; those of a row stand side by side.
        key: the key of each pair.
        open: the pairs that are looked at; the others fill up their segments.
    """

    row: Int[Tensor, " segment"]
    key: Int[Tensor, "segment width"]
    open: Bool[Tensor, "segment width"]

    @classmethod
    def of(cls, wanted: Bool[Tensor, "row key"]) -> Segments:
        """The wanted pairs; segments are filled up with the first key."""
        row, key = wanted.nonzero(as_tuple=True)
        fill = len(row) / max(1, int(wanted.any(dim=1).sum()))  # half of a row's last segment is idle in the mean
        width = WIDTH
        while width > NARROW and fill < 4 * width:
            width //= 2
        return cls._laid(row, key, min(width, wanted.shape[1]))[0]

    @classmethod
    def _laid(
        cls, row: Int[Tensor, " pair"], key: Int[Tensor, " pair"], width: int
    ) -> tuple[Segments, Int[Tensor, " pair"]]:
        """Pairs, one row's after the other's, side by side, each row beginning a segment; and where they are."""
        _, counts = row.unique_consecutive(return_counts=True)
        segments = (counts + width - 1) // width
        gap = segments.cumsum(0) * width - counts.cumsum(0) - segments * width + counts  # left by the rows before
        place = torch.arange(len(row), device=row.device) + gap.repeat_interleave(counts)
        size = int(segments.sum()) * width
        keys = key.new_zeros(size).index_put_((place,), key)
        there = torch.zeros(size, dtype=torch.bool, device=key.device).index_fill_(0, place, True)
        rows = row[counts.cumsum(0) - 1].repeat_interleave(segments)
        return cls(rows, keys.unflatten(0, (-1, width)), there.unflatten(0, (-1, width))), place

    def packed(self) -> tuple[Segments, Places]:
        """The open pairs in as few segments as hold them, and where each of the new pairs is among the old."""
        (at,) = self.open.flatten().nonzero(as_tuple=True)
        width = self.key.shape[1]
        segments, place = self._laid(self.row[at // width], self.key.flatten()[at], width)
        source = at.new_zeros(segments.key.shape).view(-1).index_put_((place,), at).view_as(segments.key)
        return segments, (source // width, source % width)

    def spread(self, part: Float[Tensor, "all feature key"]) -> Float[Tensor, "segment feature width"]:
        """The features of the pairs, from those of all rows and keys."""
        keys, width = part.shape[2], self.key.shape[1]
        if self.key.numel() == len(part) * keys and bool(self.open.all()):  # every pair, in order
            return part.unflatten(2, (-1, width)).movedim(2, 1).flatten(0, 1)
        return taken([part], (self.row[:, None].expand_as(self.key), self.key))[0]

    @property
    def needed(self) -> int:
        """How many segments the open pairs take when packed."""
        width, counts = self.key.shape[1], self.open.sum(dim=1)
        of_rows = counts.new_zeros(int(self.row.amax()) + 1).index_add_(0, self.row, counts)
        return int(((of_rows + width - 1) // width).sum())


def taken(
    parts: Sequence[Float[Tensor, "group feature place"]], at: Places
) -> list[Float[Tensor, "fewer feature width"]]:
    """The features of some pairs, in new segments; of parts of one shape, which share the places of their numbers."""
    one = parts[0]
    dtype = torch.int32 if one.numel() < 2**31 else torch.long  # half the memory
    feature = torch.arange(one.shape[1], dtype=dtype, device=one.device)[:, None] * one.shape[2]
    index = (at[0] * one[0].numel() + at[1])[:, None].to(dtype) + feature
    return [part.flatten().index_select(0, index.flatten()).view(index.shape) for part in parts]
