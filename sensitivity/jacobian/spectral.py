"""Spectral norms of attention blocks by Lanczos iteration on the structured product, never on a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.query_rows import Rows
from sensitivity.jacobian.tridiagonal import largest_eigenvalue

FIRST_CHECK, EVERY = 6, 2  # steps before convergence is looked at, and between looks
RARE, BEYOND = 1e-6, 0.05  # a random start hides less than one part in a million of a direction about as rarely
DECOMPOSITION = 500  # what decomposing a block costs, in steps that look at it
MARGIN = 0.2  # the error is estimated from Ritz values, which stand a little further apart than eigenvalues


@dataclass(frozen=True)
class BlockOperator:
    r"""The blocks of some rows as operators: :math:`x \mapsto \sum_h W_O^h (\alpha^h W_V^h x + r^h (w_h \cdot x))`.

    With :math:`B` the inner factor, :math:`J = W_O B`, and :math:`R` the symmetric root of :math:`W_O^T W_O`, the
    squared singular values of :math:`J` are the eigenvalues of :math:`R B B^T R`.

    Attributes:
        value: what multiplies the value path, :math:`\alpha^h_{ij}`.
        deviation: :math:`r^h_{ij} = \alpha^h v^h_j - a^h o^h_i`, the left vectors of the key path.
        along: :math:`W_V w_h(i)` of all heads, with :math:`w_h(i) = c W_K^{hT} q^h_i` the right vectors of that path.
        products: :math:`w_h(i) \cdot w_g(i)`.
        values: :math:`W_V W_V^T` of all heads.
        root: :math:`R`.
    """

    value: Float[Tensor, "row head 1 key"]
    deviation: Float[Tensor, "row head value_width key"]
    along: Float[Tensor, "row inner head"]
    products: Float[Tensor, "row head head"]
    values: Float[Tensor, "1 inner inner"]
    root: Float[Tensor, "1 inner inner"]

    @classmethod
    def of(cls, attention: SoftmaxAttention, rows: Rows) -> BlockOperator:
        """The operators of some rows, those of all samples one after the other."""
        weights, alpha = (part.movedim(1, 2).flatten(0, 1)[:, :, None] for part in (rows.weights, rows.alpha))
        deviation = (alpha.unflatten(0, (-1, len(rows.index))) * rows.source.value.mT[:, None]).flatten(0, 1)
        deviation.addcmul_(rows.mean.movedim(1, 2).flatten(0, 1)[..., None], weights, value=-1)
        gradient = (attention.scale * rows.query @ attention.key_weight).movedim(1, 2).flatten(0, 1)
        w_v, w_o = attention.value_weight.flatten(0, 1), attention.output_weight.movedim(0, 1).flatten(1)
        sizes, vectors = torch.linalg.eigh(w_o.mT @ w_o)
        return cls(
            value=alpha,
            deviation=deviation,
            along=w_v @ gradient.mT,
            products=gradient @ gradient.mT,
            values=(w_v @ w_v.mT)[None],
            root=((vectors * sizes.clamp_min(0).sqrt()) @ vectors.mT)[None],
        )

    def only(self, path: str | None = None, head: int | None = None) -> BlockOperator:
        """The same blocks with one path (``value`` or ``key``) or one head alone."""
        value, deviation = self.value, self.deviation
        if path == "key":
            value = torch.zeros_like(value)
        if path == "value":
            deviation = torch.zeros_like(deviation)
        if head is not None:
            chosen = torch.zeros(value.shape[1], 1, 1, dtype=value.dtype, device=value.device)
            chosen[head] = 1
            value, deviation = value * chosen, deviation * chosen
        return dataclasses.replace(self, value=value, deviation=deviation)

    def unit(self) -> tuple[BlockOperator, Float[Tensor, "row key"]]:
        """The operators over their size, or the squares of vanishing weights would underflow; and the size."""
        size = torch.linalg.vector_norm(self.deviation.flatten(1, 2), dim=1) + self.value[:, :, 0].abs().amax(dim=1)
        unit = torch.where(size > 0, size, 1.0)[:, None, None]
        return dataclasses.replace(self, value=self.value / unit, deviation=self.deviation / unit), size

    def square(self, x: Float[Tensor, "row inner key"]) -> Float[Tensor, "row inner key"]:
        r""":math:`R B B^T R x` for every pair."""
        heads, root = self.value.shape[1:2], self.root.expand(len(x), -1, -1)
        split = (root @ x).unflatten(1, (*heads, -1))
        scaled = (self.value * split).flatten(1, 2)
        onto = (self.deviation * split).sum(dim=2)
        back = torch.baddbmm(self.along @ onto, self.values.expand(len(x), -1, -1), scaled).unflatten(1, (*heads, -1))
        onto = torch.baddbmm(self.along.mT @ scaled, self.products, onto)
        return root @ torch.addcmul(self.value * back, self.deviation, onto[:, :, None]).flatten(1, 2)

    def pairs(self, row: Int[Tensor, " pair"], key: Int[Tensor, " pair"]) -> BlockOperator:
        """The operators of some pairs, each a row with one key."""
        value, deviation = self.value[row, :, :, key, None], self.deviation[row, :, :, key, None]
        return BlockOperator(value, deviation, self.along[row], self.products[row], self.values, self.root)

    def largest(self) -> Float[Tensor, " pair"]:
        """Largest eigenvalue of every pair's product, from a decomposition."""
        unit = torch.eye(self.root.shape[-1], dtype=self.root.dtype, device=self.root.device)
        return torch.linalg.eigvalsh(self.square(unit.expand(len(self.value), -1, -1)))[..., -1]


def norms(operator: BlockOperator, tolerance: float, seed: int = 0) -> Float[Tensor, "row key"]:
    """Largest singular value of every block, to the relative ``tolerance``.

    Lanczos from a seeded random start, without the reorthogonalisation that the largest Ritz value does not need. It
    ends when the estimated error of every block is below the tolerance; the few blocks that are still not there when
    all others are, or after twice the steps that exhaust their space, are decomposed.
    """
    operator, size = operator.unit()
    limit = 2 * operator.root.shape[-1]
    top, left = torch.zeros_like(size), torch.ones_like(size, dtype=torch.bool)
    near = ~left
    diagonal, beside = list[Tensor](), list[Tensor]()
    for step, (entry, residual) in enumerate(_lanczos(operator, seed), start=1):
        diagonal.append(entry)
        if step == limit or (step >= FIRST_CHECK and (step - FIRST_CHECK) % EVERY == 0):
            lines = [entry[left] for entry in diagonal], [entry[left] for entry in beside]
            top[left], close, unseen = largest_eigenvalue(*lines, residual[left], MARGIN * 2 * tolerance, BEYOND)
            near[left] |= close
            left[left.clone()] = ~(near[left] & (unseen < RARE))
            if step == limit or int(left.sum()) * DECOMPOSITION <= left.numel():
                break
        beside.append(residual)
    row, key = left.nonzero(as_tuple=True)
    if len(row):
        top[row, key] = operator.pairs(row, key).largest()
    return top.clamp_min(0).sqrt() * size


def _lanczos(operator: BlockOperator, seed: int) -> Iterator[tuple[Float[Tensor, "row key"], Float[Tensor, "row key"]]]:
    """The entries on and beside the diagonal of each block's tridiagonal matrix, step by step."""
    generator = torch.Generator().manual_seed(seed)
    rows, inner, _ = operator.along.shape
    start = torch.randn(inner, 1, generator=generator, dtype=torch.float64).to(operator.value)
    image = start.expand(rows, inner, operator.value.shape[-1])
    vector, beside = torch.zeros_like(image), torch.zeros_like(operator.value[:, 0])
    length = torch.linalg.vector_norm(start).expand_as(beside)
    while True:
        before, vector = vector, image * torch.where(length > 0, 1 / length, 0.0)
        image = operator.square(vector)
        along = (image * vector).sum(dim=1, keepdim=True)
        image.addcmul_(vector, along, value=-1).addcmul_(before, beside, value=-1)
        length = image.square().sum(dim=1, keepdim=True).sqrt_()
        # an exhausted space leaves rounding noise: from there on zeros, and the Ritz values stay exact
        noise = 100 * torch.finfo(image.dtype).eps * (along.abs() + beside)
        length = beside = torch.where(length > noise, length, 0.0)
        yield along[:, 0], length[:, 0]
