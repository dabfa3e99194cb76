"""Spectral norms of attention blocks by Lanczos iteration on the structured product, never on a block."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.query_rows import Rows, RowSource

FIRST_CHECK, EVERY = 6, 3  # steps before convergence is looked at, and between looks


@dataclass(frozen=True)
class BlockOperator:
    r"""The blocks of a tile as operators: :math:`x \mapsto \sum_h W_O^h (\alpha^h W_V^h x + r^h (w_h \cdot x))`.

    Attributes:
        value: what multiplies the value path, :math:`\alpha^h_{ij}`.
        deviation: :math:`r^h_{ij} = \alpha^h v^h_j - a^h o^h_i`, the left vectors of the key path.
        gradient: :math:`w_h(i) = c W_K^{hT} q^h_i`, its right vectors.
        value_weight: :math:`W_V` of all heads, ``(head * value_width, dim)``.
        outputs: :math:`W_O^T W_O` of all heads.
    """

    value: Float[Tensor, "sample row key head"]
    deviation: Float[Tensor, "sample row key head value_width"]
    gradient: Float[Tensor, "sample row head dim"]
    value_weight: Float[Tensor, "inner dim"]
    outputs: Float[Tensor, "inner inner"]

    @classmethod
    def of(cls, attention: SoftmaxAttention, source: RowSource, rows: Rows) -> BlockOperator:
        """The operators of some rows."""
        deviation = rows.alpha[..., None] * source.value[:, :, None] - rows.weights[..., None] * rows.mean[..., None, :]
        w_o = attention.output_weight.movedim(0, 1).flatten(1)
        return cls(
            value=rows.alpha.movedim(1, -1),
            deviation=deviation.movedim(1, -2),
            gradient=(attention.scale * rows.query @ attention.key_weight).movedim(1, 2),
            value_weight=attention.value_weight.flatten(0, 1),
            outputs=w_o.mT @ w_o,
        )

    def only(self, path: str | None = None, head: int | None = None) -> BlockOperator:
        """The same blocks with one path (``value`` or ``key``) or one head alone."""
        value, deviation = self.value, self.deviation
        if path == "key":
            value = torch.zeros_like(value)
        if path == "value":
            deviation = torch.zeros_like(deviation)
        if head is not None:
            chosen = torch.zeros(value.shape[-1], dtype=value.dtype, device=value.device)
            chosen[head] = 1
            value, deviation = value * chosen, deviation * chosen[:, None]
        return dataclasses.replace(self, value=value, deviation=deviation)

    def gram(self, x: Float[Tensor, "sample row key dim"]) -> Float[Tensor, "sample row key dim"]:
        """:math:`J_{ij}^T J_{ij} x` for every pair."""
        heads_shape = self.deviation.shape[-2:]
        along = (x @ self.gradient.mT)[..., None]
        inner = self.value[..., None] * (x @ self.value_weight.mT).unflatten(-1, heads_shape) + self.deviation * along
        inner = (inner.flatten(-2) @ self.outputs).unflatten(-1, heads_shape)
        back = (self.value[..., None] * inner).flatten(-2) @ self.value_weight
        return back + (self.deviation * inner).sum(dim=-1) @ self.gradient


def norms(operator: BlockOperator, tolerance: float, seed: int = 0) -> Float[Tensor, "sample row key"]:
    """Largest singular value of every block, to the relative ``tolerance``.

    Lanczos on :math:`J^T J` with full reorthogonalisation from a seeded random start; it ends when the estimated error
    of every block is below the tolerance, or when the Krylov space is the whole space and the value is exact.
    """
    shape, dim = operator.value.shape[:3], operator.gradient.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(dim, generator=generator, dtype=torch.float64).to(operator.gradient)
    vector = (start / torch.linalg.vector_norm(start)).expand(*shape, dim)
    # blocks of vanishing weight are scaled to size one, or their squares would underflow
    size = torch.linalg.vector_norm(operator.deviation, dim=(-2, -1)) + operator.value.abs().amax(dim=-1)
    unit = torch.where(size > 0, size, 1.0)
    operator = dataclasses.replace(
        operator, value=operator.value / unit[..., None], deviation=operator.deviation / unit[..., None, None]
    )
    basis, diagonal, off_diagonal = [vector], list[Tensor](), list[Tensor]()
    for step in range(1, dim + 1):
        image = operator.gram(basis[-1])
        diagonal.append((image * basis[-1]).sum(dim=-1))
        known, before = torch.stack(basis, dim=-2), torch.linalg.vector_norm(image, dim=-1)
        for _ in range(2):  # twice is enough to keep the basis orthogonal to rounding
            image = image - ((known @ image[..., None]).mT @ known)[..., 0, :]
        length = torch.linalg.vector_norm(image, dim=-1)
        # an exhausted Krylov space leaves rounding noise: from there on zeros, and the Ritz values stay exact
        length = torch.where(length > 100 * torch.finfo(image.dtype).eps * before, length, 0.0)
        if step == dim or (step >= FIRST_CHECK and (step - FIRST_CHECK) % EVERY == 0):
            top, error = _ritz(diagonal, off_diagonal, length)
            if step == dim or bool((error <= 2 * tolerance * top).all()):
                break
        off_diagonal.append(length)
        basis.append(torch.where(length > 0, 1 / length, 0.0)[..., None] * image)
    return top.clamp_min(0).sqrt() * torch.where(size > 0, size, 0.0)


def _ritz(
    diagonal: list[Tensor], off_diagonal: list[Tensor], residual: Tensor
) -> tuple[Float[Tensor, "sample row key"], Float[Tensor, "sample row key"]]:
    """Largest Ritz value of the tridiagonal matrices, and the estimated error of it."""
    tridiagonal = torch.diag_embed(torch.stack(diagonal, dim=-1))
    if off_diagonal:
        beside = torch.stack(off_diagonal, dim=-1)
        tridiagonal = tridiagonal + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    bound = residual * vectors[..., -1, -1].abs()
    if values.shape[-1] == 1:
        return values[..., -1], bound
    gap = (values[..., -1] - values[..., -2]).clamp_min(torch.finfo(values.dtype).tiny)
    return values[..., -1], torch.minimum(bound, bound**2 / gap)
