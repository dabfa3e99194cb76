"""Frobenius norms of diagonal blocks by the cheapest way there is, and by another where that one loses digits."""

from __future__ import annotations

import functools
from functools import cached_property

from jaxtyping import Bool, Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian import diagonal_kernel
from sensitivity.jacobian.diagonal import DiagonalBlocks, DiagonalNorms, norms_of_blocks
from sensitivity.jacobian.diagonal_forms import DiagonalForms, DiagonalSquares
from sensitivity.jacobian.frames import Frame
from sensitivity.jacobian.frobenius import root
from sensitivity.jacobian.geometry import Geometry
from sensitivity.jacobian.query_rows import Rows, RowSource

FEW = 2**22  # numbers in the deviations of rows whose covariances are summed one by one
SPARED = 2**27  # products and sums that take about as long as the many small steps of a frame and its forms
FRAMED = 32  # rows whose blocks take about as long as the decompositions of a frame
FRUITLESS = 0.25  # of a tile's rows that the kernel may lose before it is no longer asked


def blocks_pay(attention: SoftmaxAttention, length: int, rows: int) -> bool:
    """Whether there are so few rows that their blocks are cheaper than what forms need of a layer beforehand."""
    width = attention.heads * attention.value_weight.shape[1]
    of_row = attention.dim * (width * attention.width + attention.out_dim * width)
    return rows <= FRAMED + SPARED // of_row and not diagonal_kernel.pays(attention, length)


class Ways:
    """What the ways of a layer share: its frame and forms, made when they are first wanted.

    Args:
        attention: the layer.
        length: of its sequences.
    """

    def __init__(self, attention: SoftmaxAttention, length: int) -> None:
        self.attention, self.by_kernel = attention, diagonal_kernel.pays(attention, length)

    @cached_property
    def frame(self) -> Frame:
        """The layer in orthonormal coordinates."""
        return Frame.of(self.attention)

    @cached_property
    def geometry(self) -> Geometry:
        """The geometry of the layer in whose coordinates the rows are that ``of`` is given."""
        return Geometry.of(self.attention if self.by_kernel else self.frame.attention)

    @cached_property
    def forms(self) -> DiagonalForms:
        """The forms in the frame."""
        return DiagonalForms.of(self.frame, Geometry.of(self.frame.attention) if self.by_kernel else self.geometry)

    def of(self, tokens: Float[Tensor, "sample time dim"], samples: slice) -> DiagonalWays:
        """The ways to the norms of some samples."""
        return DiagonalWays(self, tokens, samples)


class DiagonalWays:
    """Norms of the diagonal blocks of some samples: from a kernel of keys, from forms in a frame, or from the blocks.

    Attributes:
        source: the samples, from which the rows come.
    """

    def __init__(self, ways: Ways, tokens: Float[Tensor, "sample time dim"], samples: slice) -> None:
        self.ways, self._source = ways, functools.partial(RowSource, ways.attention, tokens, samples)
        self.kernel: diagonal_kernel.DiagonalKernel | None = None
        if ways.by_kernel:
            self.source = self._source(table=False)
            self.kernel = diagonal_kernel.DiagonalKernel(self.source)
        else:
            self.source = self.framed

    @cached_property
    def framed(self) -> RowSource:
        """The samples in the coordinates of the frame."""
        return self._source(frame=self.ways.frame)

    def norms(self, rows: Rows) -> DiagonalNorms:
        """The norms of some rows."""
        attention, squares = self.ways.attention, self._squares(rows)
        # roots are taken in place, and blocks without a residual have one square for both
        removed, total, query = (root(part) for part in (squares.removed.clone(), squares.total, squares.query))
        bad = _marked(squares.doubtful)
        if len(bad):
            few = self._is_few(bad)
            source = self.source if few and not self.source.tabled else self._source(table=not few)
            blocks = DiagonalBlocks.of(attention, source.rows(rows.index[bad]))
            found = norms_of_blocks(blocks, attention, "frobenius", True, False)
            total[:, bad] = found.total
            removed[:, bad] = found.total if found.removed is None else found.removed
            assert found.query is not None
            query[:, bad] = found.query
        return DiagonalNorms(total, removed if attention.out_dim == attention.dim else None, query)

    def _squares(self, rows: Rows) -> DiagonalSquares:
        if not self.ways.by_kernel:
            return self.ways.forms.squares(rows)
        if self.kernel is None:
            return self.ways.forms.squares(self.framed.rows(rows.index))
        squares = self.kernel.squares(rows)
        bad = _marked(squares.doubtful)
        if not self._is_few(bad):
            if len(bad) > FRUITLESS * len(rows.index):
                self.kernel = None
            others = self.ways.forms.squares(self.framed.rows(rows.index[bad]))
            for part, other in zip(squares, others, strict=True):
                part[:, bad] = other
        return squares

    def _is_few(self, rows: Int[Tensor, " some"]) -> bool:
        """Whether the covariances of so many rows are cheaper without a table of all products."""
        return len(rows) * self.source.value.numel() <= FEW


def _marked(doubtful: Bool[Tensor, "sample row"]) -> Int[Tensor, " some"]:
    """The rows that are marked in any sample."""
    return doubtful.any(dim=0).nonzero()[:, 0]
