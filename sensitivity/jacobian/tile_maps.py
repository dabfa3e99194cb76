"""Norm maps of tiles: some samples and some query rows at a time, by kind of norm."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian import diagonal_ways, spectral
from sensitivity.jacobian.diagonal import DiagonalBlocks, DiagonalNorms, norms_of_blocks
from sensitivity.jacobian.diagonal_ways import Ways
from sensitivity.jacobian.frobenius import Brackets, Columns
from sensitivity.jacobian.geometry import Geometry
from sensitivity.jacobian.norms import NormMaps
from sensitivity.jacobian.query_rows import Rows, RowSource

MapsOf: TypeAlias = Callable[[Tensor], NormMaps]  # of the rows at the query times that it is given
DiagonalOf: TypeAlias = Callable[[Rows], DiagonalNorms]


class SpectralTiles:
    """Spectral norms, by iteration off the diagonal and by decomposition on it.

    Args:
        attention: the layer.
        paths: also the map of each path.
        heads: also the map of each head.
        tolerance: relative tolerance of the iteration.
    """

    def __init__(self, attention: SoftmaxAttention, paths: bool, heads: bool, tolerance: float) -> None:
        self.attention, self.paths, self.heads, self.tolerance = attention, paths, heads, tolerance
        self.outputs = spectral.root(attention)

    def of(self, tokens: Float[Tensor, "sample time dim"], samples: slice) -> MapsOf:
        """What gives the maps of some samples' rows."""
        return functools.partial(self._maps, RowSource(self.attention, tokens, samples))

    def _maps(self, source: RowSource, index: Int[Tensor, " row"]) -> NormMaps:
        rows = source.rows(index)
        operator = spectral.BlockOperator.of(self.attention, rows, self.outputs)

        def norms(**part: Any) -> Tensor:
            found = spectral.norms(operator.only(**part), self.tolerance)
            return found.unflatten(0, (rows.weights.shape[0], -1))

        maps = NormMaps(total=norms(), attention=rows.weights)
        if self.heads:
            maps.heads = torch.stack([norms(head=head) for head in range(self.attention.heads)], dim=1)
        if self.paths:
            maps.paths = {name: norms(path=name) for name in ("value", "key")}
        blocks = DiagonalBlocks.of(self.attention, rows)
        found = norms_of_blocks(blocks, self.attention, "spectral", self.paths, self.heads)
        put_diagonal(maps, self.attention, index, found, 1.0)
        return maps


class FrobeniusTiles:
    """Frobenius norms: brackets off the diagonal; on it the cheapest way, or the blocks where heads are wanted too.

    For some hundred rows the blocks are the cheapest way.

    Args:
        attention: the layer.
        length: of its sequences.
        rows: how many rows there are in all samples together.
        paths: also the map of each path.
        heads: also the map of each head.
    """

    def __init__(self, attention: SoftmaxAttention, length: int, rows: int, paths: bool, heads: bool) -> None:
        self.attention, self.paths, self.heads = attention, paths, heads
        blocks = heads or diagonal_ways.blocks_pay(attention, length, rows * (1 + paths))  # the query path is one more
        self.ways = None if blocks else Ways(attention, length)
        self.geometry = Geometry.of(attention) if self.ways is None else self.ways.geometry

    def of(self, tokens: Float[Tensor, "sample time dim"], samples: slice) -> MapsOf:
        """What gives the maps of some samples' rows."""
        if self.ways is None:
            source, diagonal = RowSource(self.attention, tokens, samples), self._of_blocks
        else:
            ways = self.ways.of(tokens, samples)
            source, diagonal = ways.source, ways.norms
        return functools.partial(self._maps, Columns(self.geometry, source.value), source, diagonal)

    def _maps(self, columns: Columns, source: RowSource, diagonal: DiagonalOf, index: Int[Tensor, " row"]) -> NormMaps:
        rows = source.rows(index)
        brackets = Brackets(columns, rows)
        maps = NormMaps(total=brackets.norms(), attention=rows.weights)
        if self.heads:
            maps.heads = brackets.head_norms()
        if self.paths:
            maps.paths = {"value": brackets.value_norms(), "key": brackets.norms(value_path=False)}
        put_diagonal(maps, self.attention, index, diagonal(rows), math.sqrt(self.attention.dim))
        return maps

    def _of_blocks(self, rows: Rows) -> DiagonalNorms:
        blocks = DiagonalBlocks.of(self.attention, rows)
        return norms_of_blocks(blocks, self.attention, "frobenius", self.paths, self.heads)


def put_diagonal(
    maps: NormMaps, attention: SoftmaxAttention, index: Int[Tensor, " row"], found: DiagonalNorms, unit: float
) -> None:
    """Replaces the entries on the diagonal, where the query and residual paths add to the others, by exact ones.

    Args:
        maps: the maps of the rows.
        attention: the layer.
        index: their query times.
        found: the norms of their diagonal blocks.
        unit: the norm of the identity.
    """
    places = torch.arange(len(index), device=index.device)
    if maps.heads is not None and found.heads is not None:
        maps.heads[:, :, places, index] = found.heads
    if maps.paths and found.query is not None:
        zero = torch.zeros_like(maps.total)
        maps.paths = {"residual": zero, **maps.paths, "query": zero.clone()}
        maps.paths["residual"][:, places, index] = unit * abs(float(attention.residual))
        maps.paths["query"][:, places, index] = found.query
    maps.total[:, places, index] = found.total
    maps.diagonal = found.removed
