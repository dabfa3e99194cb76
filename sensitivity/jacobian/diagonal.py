"""The diagonal blocks of a tile of rows, where all four paths meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.norms import Norm, block_norms, largest_singular_values
from sensitivity.jacobian.query_rows import Rows


@dataclass(frozen=True)
class DiagonalBlocks:
    r"""Diagonal blocks without the residual, before :math:`W_O`.

    Attributes:
        inner: the value, key and query paths together.
        query: the query path alone.
        outputs: :math:`W_O`, which takes ``inner`` to the blocks.
    """

    inner: Float[Tensor, "sample row head inner dim"]
    query: Float[Tensor, "sample row head inner dim"]
    outputs: Float[Tensor, "head out inner"]

    @classmethod
    def of(cls, attention: SoftmaxAttention, rows: Rows) -> DiagonalBlocks:
        """The blocks of some rows."""
        alpha, deviation = (part.transpose(1, 2)[..., None] for part in rows.on_diagonal())
        gradient = (attention.scale * rows.query @ attention.key_weight).transpose(1, 2)
        covariance = rows.covariance().movedim(-1, 2)
        query = covariance.flatten(2, 3) @ (attention.scale * attention.query_weight)
        query = query.unflatten(2, covariance.shape[2:4]).transpose(1, 2)
        # the heads of a row next to one another, as their product with the outputs wants them
        out = None if torch.is_grad_enabled() else query.new_empty(query.shape)
        inner = torch.addcmul(query, attention.value_weight, alpha, out=out)
        inner.addcmul_(deviation, gradient[:, :, :, None])
        return cls(inner, query, attention.output_weight)

    def total(self, query: bool = False) -> Float[Tensor, "sample row out dim"]:
        """The blocks of all heads together, or their query path."""
        inner = (self.query if query else self.inner).flatten(2, 3)
        return self.outputs.movedim(0, 1).flatten(1) @ inner

    def heads(self) -> Float[Tensor, "sample head row out dim"]:
        """The blocks of every head."""
        return (self.outputs @ self.inner).transpose(1, 2)


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


def _norms(blocks: Float[Tensor, "*axes out dim"], norm: Norm) -> Float[Tensor, "*axes"]:
    return block_norms(blocks, norm) if norm == "frobenius" else largest_singular_values(blocks)


def norms_with_residual(
    blocks: Float[Tensor, "sample row dim dim"], residual: float, norm: Norm
) -> tuple[Float[Tensor, "sample row"], Float[Tensor, "sample row"]]:
    """Norms of blocks and of blocks plus ``residual`` times the identity; the blocks are used up."""
    alone = _norms(blocks, norm)
    blocks.diagonal(dim1=-2, dim2=-1).add_(residual)
    return alone, _norms(blocks, norm)
