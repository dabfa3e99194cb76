"""The diagonal blocks of a tile of rows, where all four paths meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.norms import Norm, largest_singular_values
from sensitivity.jacobian.query_rows import Rows


@dataclass(frozen=True)
class DiagonalBlocks:
    r"""Diagonal blocks without the residual, before :math:`W_O`, rows on the last axis.

    Attributes:
        inner: the value, key and query paths together.
        query: the query path alone.
        outputs: :math:`W_O`, which takes ``inner`` to the blocks.
    """

    inner: Float[Tensor, "sample head inner dim row"]
    query: Float[Tensor, "sample head inner dim row"]
    outputs: Float[Tensor, "head out inner"]

    @classmethod
    def of(cls, attention: SoftmaxAttention, rows: Rows, keep_query: bool = True) -> DiagonalBlocks:
        """The blocks of some rows; ``keep_query=False`` saves a copy where the query path alone is not wanted."""
        alpha, deviation = rows.on_diagonal()
        gradient = attention.scale * rows.query @ attention.key_weight
        query_weight = attention.scale * attention.query_weight
        query = query_weight.mT[:, None] @ rows.covariance()
        inner = query.clone() if keep_query else query
        inner.addcmul_(attention.value_weight[..., None], alpha.mT[:, :, None])
        inner.addcmul_(deviation.mT[:, :, :, None], gradient.mT[:, :, None])
        return cls(inner, query, attention.output_weight)

    def total(self, query: bool = False) -> Float[Tensor, "sample out dim row"]:
        """The blocks of all heads together, or their query path."""
        inner = self.query if query else self.inner
        outputs = self.outputs.movedim(0, 1).flatten(1)
        return (outputs @ inner.flatten(3).flatten(1, 2)).unflatten(2, inner.shape[3:])

    def heads(self) -> Float[Tensor, "sample head out dim row"]:
        """The blocks of every head."""
        return (self.outputs @ self.inner.flatten(3)).unflatten(3, self.inner.shape[3:])


class DiagonalNorms(NamedTuple):
    """Norms of the diagonal blocks of some rows.

    Attributes:
        total: of the whole blocks.
        removed: of the blocks without the residual; None where they are not square.
        query: of the query path alone, where it is wanted.
        heads: of every head's blocks, where they are wanted.
    """

    total: Float[Tensor, "sample row"]
    removed: Float[Tensor, "sample row"] | None = None
    query: Float[Tensor, "sample row"] | None = None
    heads: Float[Tensor, "sample head row"] | None = None


def norms_of_blocks(
    blocks: DiagonalBlocks, attention: SoftmaxAttention, norm: Norm, query: bool, heads: bool
) -> DiagonalNorms:
    """Norms of blocks that are there, of their query path and their heads where those are wanted."""
    of_query = _norms(blocks.total(query=True), norm) if query else None
    of_heads = _norms(blocks.heads(), norm) if heads else None
    if attention.out_dim != attention.dim:
        return DiagonalNorms(_norms(blocks.total(), norm), None, of_query, of_heads)
    removed, total = norms_with_residual(blocks.total(), float(attention.residual), norm)
    return DiagonalNorms(total, removed, of_query, of_heads)


def _norms(blocks: Float[Tensor, "*axes out dim row"], norm: Norm) -> Float[Tensor, "*axes row"]:
    """Norms of blocks whose rows stand last."""
    if norm == "frobenius":
        return blocks.square().sum(dim=(-3, -2)).sqrt_()
    return largest_singular_values(blocks.movedim(-1, -3))


def norms_with_residual(
    blocks: Float[Tensor, "sample dim dim row"], residual: float, norm: Norm
) -> tuple[Float[Tensor, "sample row"], Float[Tensor, "sample row"]]:
    """Norms of blocks and of blocks plus ``residual`` times the identity; the blocks are used up."""
    entries = blocks.diagonal(dim1=1, dim2=2)
    if norm == "frobenius":
        own = entries.clone()
        entries.zero_()
        others = blocks.square_().sum(dim=(1, 2))
        shifted = (own + residual).square_()
        return (others + own.square_().sum(dim=-1)).sqrt_(), (others + shifted.sum(dim=-1)).sqrt_()
    alone = _norms(blocks, norm)
    entries.add_(residual)
    return alone, _norms(blocks, norm)
