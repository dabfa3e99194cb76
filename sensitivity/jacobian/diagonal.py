"""The diagonal blocks of a tile of rows, where all four paths meet."""

from __future__ import annotations

from dataclasses import dataclass

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
        outputs: what takes ``inner`` to the blocks, ``(head, out, inner)``; None where ``inner`` holds the blocks of
            the one head themselves.
    """

    inner: Float[Tensor, "sample head inner dim row"]
    query: Float[Tensor, "sample head inner dim row"]
    outputs: Float[Tensor, "head out inner"] | None

    @classmethod
    def of(cls, attention: SoftmaxAttention, rows: Rows, keep_query: bool = True) -> DiagonalBlocks:
        """The blocks of some rows; ``keep_query=False`` saves a copy where the query path alone is not wanted."""
        at, source = rows.index[None, None, :, None], rows.source
        weight, alpha = (
            values.gather(-1, at.expand(*values.shape[:2], -1, 1)) for values in (rows.weights, rows.alpha)
        )
        deviation = alpha * source.value[:, :, rows.index] - weight * rows.mean
        gradient = attention.scale * rows.query @ attention.key_weight
        value_weight, outputs = attention.value_weight, attention.output_weight
        query_weight = attention.scale * attention.query_weight
        if source.by_token:  # one head: its W_O goes before the covariance, which then needs no product after it
            deviation, value_weight = deviation @ outputs.mT, outputs @ value_weight
            covariance = (value_weight @ rows.token_covariance().flatten(3)).unflatten(3, (attention.dim, -1))
            query = (attention.key_weight.mT @ query_weight).mT[:, None] @ covariance
        else:
            query = query_weight.mT[:, None] @ rows.covariance()
        inner = query.clone() if keep_query else query
        inner.addcmul_(value_weight[..., None], alpha.mT[:, :, None])
        inner.addcmul_(deviation.mT[:, :, :, None], gradient.mT[:, :, None])
        return cls(inner, query, None if source.by_token else outputs)

    def total(self, query: bool = False) -> Float[Tensor, "sample out dim row"]:
        """The blocks of all heads together, or their query path."""
        inner = self.query if query else self.inner
        if self.outputs is None:
            return inner[:, 0]
        outputs = self.outputs.movedim(0, 1).flatten(1)
        return (outputs @ inner.flatten(3).flatten(1, 2)).unflatten(2, inner.shape[3:])

    def heads(self) -> Float[Tensor, "sample head out dim row"]:
        """The blocks of every head."""
        if self.outputs is None:
            return self.inner
        return (self.outputs @ self.inner.flatten(3)).unflatten(3, self.inner.shape[3:])


def diagonal_norms(blocks: Float[Tensor, "*axes out dim row"], norm: Norm) -> Float[Tensor, "*axes row"]:
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
    alone = diagonal_norms(blocks, norm)
    entries.add_(residual)
    return alone, diagonal_norms(blocks, norm)
