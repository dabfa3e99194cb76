"""Attention blocks as structured operators, of which no block is ever built."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.query_rows import Rows
from sensitivity.jacobian.traces import power_traces

CACHED = 2**20  # numbers in what is worked on at a time, for the caches to hold
CHUNK = 1024  # pairs that are decomposed at a time
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
        inside: :math:`N`, the products of the rows of :math:`W_V` and of the right vectors of the key path,
            :math:`w_h(i) = c W_K^{hT} q^h_i`, with one another.
        outputs: a root of :math:`G` with as many rows as it has rank, which may stand for :math:`W_O`.
    """

    value: Float[Tensor, "row head 1 key"]
    deviation: Float[Tensor, "row head value_width key"]
    inside: Float[Tensor, "row both both"]
    outputs: Float[Tensor, "rank inner"]

    @classmethod
    def of(cls, attention: SoftmaxAttention, rows: Rows, outputs: Tensor | None = None) -> BlockOperator:
        """The operators of some rows, those of all samples one after the other; ``outputs`` as ``root`` gives them."""
        weights, alpha = (part.movedim(1, 2).flatten(0, 1)[:, :, None] for part in (rows.weights, rows.alpha))
        deviation = (alpha.unflatten(0, (-1, len(rows.index))) * rows.source.value.mT[:, None]).flatten(0, 1)
        deviation.addcmul_(rows.mean.movedim(1, 2).flatten(0, 1)[..., None], weights, value=-1)
        gradient = (attention.scale * rows.query @ attention.key_weight).movedim(1, 2).flatten(0, 1)
        w_v = attention.value_weight.flatten(0, 1)
        right = torch.cat([w_v.expand(len(gradient), -1, -1), gradient], dim=1)
        return cls(
            value=alpha,
            deviation=deviation,
            inside=right @ right.mT,
            outputs=root(attention) if outputs is None else outputs,
        )

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
        size = torch.linalg.vector_norm(self.deviation.flatten(1, 2), dim=1) + self.value[:, :, 0].abs().amax(dim=1)
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

    def at(self, rows: Int[Tensor, " row"], keys: Int[Tensor, "row key"]) -> BlockOperator:
        """The operators of some keys of each of some rows."""
        index = keys[:, None, None]
        value, deviation = (
            part[rows].gather(-1, index.expand(-1, *part.shape[1:-1], -1)) for part in (self.value, self.deviation)
        )
        return dataclasses.replace(self, value=value, deviation=deviation, inside=self.inside[rows])

    def largest(self) -> Float[Tensor, " pair"]:
        """Largest eigenvalue of every pair's product, from a decomposition; each pair is a row with one key."""
        outputs = self.outputs.unflatten(1, (self.value.shape[1], -1))
        parts = [part.split(CHUNK) for part in (self.value[..., 0, 0], self.deviation[..., 0], self.inside)]
        found = []
        for value, deviation, inside in zip(*parts, strict=True):
            scaled = torch.einsum("ihv,ph->pihv", outputs, value).flatten(2)
            left = torch.cat([scaled, torch.einsum("ihv,phv->pih", outputs, deviation)], dim=2)
            found.append(torch.linalg.eigvalsh(left @ inside @ left.mT)[:, -1])
        return torch.cat(found)


def root(attention: SoftmaxAttention) -> Float[Tensor, "rank inner"]:
    r""":math:`W_O` of all heads side by side, turned from the left so that it has no more rows than its rank.

    Decomposed in double precision, for the rounding is that of every block.
    """
    w_o = attention.output_weight.movedim(0, 1).flatten(1)
    _, sizes, right = torch.linalg.svd(w_o.detach().cpu().double(), full_matrices=False)
    there = sizes > max(w_o.shape) * torch.finfo(w_o.dtype).eps * sizes[0]
    there[0] = True
    return (sizes[there, None] * right[there]).to(w_o)
