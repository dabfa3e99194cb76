"""Attention blocks as structured operators, of which a block is built only where all else has failed to tell of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.query_rows import Rows
from sensitivity.jacobian.traces import power_traces

CACHED = 2**20  # numbers in what is worked on at a time, for the caches to hold
BUILT = 2**20  # numbers in the blocks that are built at a time
PROVABLE, TRACED = 128, 8  # the inner width and the heads up to which traces cost less than they save


@dataclass(frozen=True)
class BlockOperator:
    r"""The blocks of some rows as operators: :math:`x \mapsto \sum_h W_O^h (\alpha^h W_V^h x + r^h (w_h \cdot x))`.

    With :math:`D` the multiplication of every head by its :math:`\alpha^h` and :math:`R` the :math:`r^h`, each in the
    rows of its head, the squared singular values are the eigenvalues of :math:`K G`, where :math:`G = W_O^T W_O` and
    :math:`K = [D, R] N [D, R]^T`.

    Attributes:
        value: what multiplies the value path, :math:`\alpha^h_{ij}`.
        deviation: :math:`r^h_{ij} = \alpha^h v^h_j - a^h o^h_i`, the left vectors of the key path.
        values: :math:`W_V` of all heads one above the other.
        gradient: the right vectors of the key path, :math:`w_h(i) = c W_K^{hT} q^h_i`.
        outputs: a root of :math:`G` with as many rows as it has rank, which may stand for :math:`W_O`.
    """

    value: Float[Tensor, "row head 1 key"]
    deviation: Float[Tensor, "row head value_width key"]
    values: Float[Tensor, "inner dim"]
    gradient: Float[Tensor, "row head dim"]
    outputs: Float[Tensor, "rank inner"]

    @classmethod
    def of(cls, attention: SoftmaxAttention, rows: Rows, outputs: Tensor | None = None) -> BlockOperator:
        """The operators of some rows, those of all samples one after the other; ``outputs`` as ``root`` gives them."""
        weights, alpha = (part.movedim(1, 2).flatten(0, 1)[:, :, None] for part in (rows.weights, rows.alpha))
        deviation = (alpha.unflatten(0, (-1, len(rows.index))) * rows.source.value.mT[:, None]).flatten(0, 1)
        deviation.addcmul_(rows.mean.movedim(1, 2).flatten(0, 1)[..., None], weights, value=-1)
        return cls(
            value=alpha,
            deviation=deviation,
            values=attention.value_weight.flatten(0, 1),
            gradient=(attention.scale * rows.query @ attention.key_weight).movedim(1, 2).flatten(0, 1),
            outputs=root(attention) if outputs is None else outputs,
        )

    @cached_property
    def inside(self) -> Float[Tensor, "row both both"]:
        """:math:`N`, the products of the rows of ``values`` and ``gradient`` with one another."""
        right = torch.cat([self.values.expand(len(self.gradient), -1, -1), self.gradient], dim=1)
        return right @ right.mT

    @property
    def rank(self) -> int:
        """How many eigenvalues can differ from zero."""
        return len(self.outputs)

    @property
    def gram(self) -> Float[Tensor, "inner inner"]:
        """:math:`G`."""
        return self.outputs.mT @ self.outputs

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
        deviation = self.deviation.flatten(1, 2)
        size = torch.maximum(deviation.amax(dim=1), deviation.amin(dim=1).neg_()) + self.value[:, :, 0].abs().amax(
            dim=1
        )
        unit = torch.where(size > 0, size, 1.0)[:, None, None]
        return dataclasses.replace(self, value=self.value / unit, deviation=self.deviation / unit), size

    @property
    def provable(self) -> bool:
        """Whether the traces that bound what an iteration misses cost less than they save."""
        return self.outputs.shape[1] <= PROVABLE and self.value.shape[1] <= TRACED

    def traces(self) -> Float[Tensor, "2 row key"]:
        """Trace, and squared Frobenius norm, of every pair's product."""
        rows, gram = max(1, CACHED // (self.deviation[0].numel() * self.value.shape[1])), self.gram
        parts = zip(self.value.split(rows), self.deviation.split(rows), self.inside.split(rows), strict=True)
        found = [power_traces(value, deviation, inside, gram) for value, deviation, inside in parts]
        return torch.cat([torch.stack(pair) for pair in found], dim=1)

    def largest(self, row: Int[Tensor, " pair"], key: Int[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """Largest eigenvalue of the products of some pairs, from decompositions."""
        return torch.cat([torch.linalg.eigvalsh(product)[:, -1] for product in self._products(row, key)])

    def fourth(self, row: Int[Tensor, " pair"], key: Int[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """Trace of the fourth power of the products of some pairs."""
        squares = (torch.bmm(product, product) for product in self._products(row, key))
        return torch.cat([square.square_().sum(dim=(1, 2)) for square in squares])

    def _products(
        self, row: Int[Tensor, " pair"], key: Int[Tensor, " pair"]
    ) -> Iterator[Float[Tensor, "pair rank rank"]]:
        """Blocks times themselves, some at a time; the only place where blocks are built."""
        outputs = self.outputs.unflatten(1, (self.value.shape[1], -1)).movedim(1, 0)
        maps = outputs @ self.values.unflatten(0, (len(outputs), -1))
        chunk = max(1, BUILT // (2 * maps[0].numel()))
        for i, j in zip(row.split(chunk), key.split(chunk), strict=True):
            alpha, deviation = self.value[i, :, 0, j].mT[..., None, None], self.deviation[i, :, :, j].movedim(1, 0)
            block = alpha[0] * maps[0]
            for weight, one in zip(alpha[1:], maps[1:], strict=True):
                block.addcmul_(weight, one)
            block.baddbmm_((deviation @ outputs.mT).permute(1, 2, 0), self.gradient[i])
            yield block @ block.mT


def root(attention: SoftmaxAttention) -> Float[Tensor, "rank inner"]:
    r""":math:`W_O` of all heads side by side, turned from the left so that it has no more rows than its rank.

    Decomposed in double precision, for the rounding is that of every block.
    """
    w_o = attention.output_weight.movedim(0, 1).flatten(1)
    _, sizes, right = torch.linalg.svd(w_o.detach().cpu().double(), full_matrices=False)
    there = sizes > max(w_o.shape) * torch.finfo(w_o.dtype).eps * sizes[0]
    there[0] = True
    return (sizes[there, None] * right[there]).to(w_o)
