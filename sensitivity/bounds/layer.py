"""Constants of a layer that its bounds are made of: norms of value maps, score maps, and their products."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention

SUBSET_WORK = 2e9  # multiplications that a table of subset norms may cost


@dataclass(frozen=True)
class LayerConstants:
    r"""What the bounds need to know of the weights, in float64.

    Attributes:
        value_maps: :math:`M_h = W_O W_V`, ``(head, out, dim)``.
        inner_value_maps: :math:`W_V`, ``(head, value_width, dim)``.
        score_maps: :math:`N_h = c W_K^T W_Q`: the scores of row i have the gradient :math:`w_h(i) = N_h x_i + n_h`.
        score_offsets: :math:`n_h = c W_K^T b_Q`, ``(head, dim)``.
        key_maps: :math:`c W_K`, ``(head, width, dim)``.
        query_size: spectral norm of the :math:`W_Q` of all heads, stacked.
        outputs: singular values of :math:`[W_O^1 \dots W_O^H]`, padded with zeros to ``out``.
        spectral: whether blocks are measured by their spectral norm (else Frobenius).
    """

    value_maps: Float[Tensor, "head out dim"]
    inner_value_maps: Float[Tensor, "head value_width dim"]
    score_maps: Float[Tensor, "head dim dim"]
    score_offsets: Float[Tensor, "head dim"]
    key_maps: Float[Tensor, "head width dim"]
    query_size: float
    outputs: Float[Tensor, " out"]
    spectral: bool
    subsets: Float[Tensor, " subset"] | None = field(repr=False, default=None)

    @classmethod
    def of(cls, attention: SoftmaxAttention, spectral: bool) -> LayerConstants:
        """The constants of a layer; see the class for their meaning."""
        key, scale = attention.key_weight.double(), attention.scale
        value_maps = attention.output_weight.double() @ attention.value_weight.double()
        bias = attention.query_bias
        offsets = torch.zeros(key.shape[0], key.shape[2], dtype=key.dtype, device=key.device)
        if bias is not None:
            offsets = scale * torch.einsum("hwd,hw->hd", key, bias.double())
        outputs = torch.linalg.svdvals(attention.output_weight.double().movedim(0, 1).flatten(1))
        padded = outputs.new_zeros(attention.out_dim)
        padded[: len(outputs)] = outputs
        return cls(
            value_maps=value_maps,
            inner_value_maps=attention.value_weight.double(),
            score_maps=scale * key.mT @ attention.query_weight.double(),
            score_offsets=offsets,
            key_maps=scale * key,
            query_size=float(torch.linalg.matrix_norm(attention.query_weight.double().flatten(0, 1), ord=2)),
            outputs=padded,
            spectral=spectral,
            subsets=_subset_norms(value_maps) if spectral else None,
        )

    @property
    def sizes(self) -> Float[Tensor, " head"]:
        """:math:`N(M_h)` in the norm that is asked for."""
        return torch.linalg.matrix_norm(self.value_maps, ord=2 if self.spectral else "fro")

    @property
    def operator_sizes(self) -> Float[Tensor, " head"]:
        """:math:`|M_h|_2`, whatever the norm."""
        return torch.linalg.matrix_norm(self.value_maps, ord=2)

    @property
    def identity(self) -> float:
        """Norm of the identity: 1, or sqrt(dim)."""
        return 1.0 if self.spectral else float(self.value_maps.shape[-1]) ** 0.5

    def gradients(self, tokens: Float[Tensor, "*axes dim"]) -> Float[Tensor, "*axes head dim"]:
        """:math:`w_h(i)`, the gradients of the scores of row i with respect to a key token."""
        return torch.einsum("hkd,...d->...hk", self.score_maps, tokens) + self.score_offsets

    def mixture(self, weights: Float[Tensor, "*axes head"]) -> Float[Tensor, "*axes"]:
        r"""An upper bound of :math:`N(\sum_h \beta_h M_h)` without a matrix per entry; exact for Frobenius norms.

        Spectral: with the heads in descending order of weight, :math:`\sum_h \beta_h M_h = \sum_k (\beta_{(k)} -
        \beta_{(k+1)}) \sum_{h \le k} M_{(h)}`, so the norms of the :math:`2^H` subset sums are all that is needed.

        Heads too many for that table: :math:`N^2 \le \sum_{hg} \beta_h \beta_g \min(|M_h M_g^T|, |M_h^T M_g|)` by the
        smaller of the two products.
        """
        if not self.spectral:
            gram = torch.einsum("hod,god->hg", self.value_maps, self.value_maps)
            return _quadratic(weights, gram)
        bound = _quadratic(weights.abs(), self._products[0])
        bound = torch.minimum(bound, _quadratic(weights.abs(), self._products[1]))
        if self.subsets is None or (weights < 0).any():
            return bound
        return torch.minimum(bound, _ordered(weights, self.subsets))

    @property
    def _products(self) -> tuple[Tensor, Tensor]:
        left = torch.linalg.matrix_norm(self.value_maps[:, None] @ self.value_maps[None].mT, ord=2)
        right = torch.linalg.matrix_norm(self.value_maps[:, None].mT @ self.value_maps[None], ord=2)
        return left, right


def _quadratic(weights: Tensor, matrix: Tensor) -> Tensor:
    return ((weights @ matrix) * weights).sum(dim=-1).clamp_min(0).sqrt()


def _subset_norms(maps: Float[Tensor, "head out dim"]) -> Tensor | None:
    """Spectral norm of the sum of every subset of heads, by bit mask; None where that would cost too much."""
    heads, _, dim = maps.shape
    if heads == 1:
        return torch.stack([maps.new_zeros(()), torch.linalg.matrix_norm(maps[0], ord=2)])
    if 2.0**heads * 10 * dim**3 > SUBSET_WORK:
        return None
    codes = torch.arange(2**heads, device=maps.device)
    members = (codes[:, None] >> torch.arange(heads, device=maps.device)) & 1
    return torch.linalg.matrix_norm(torch.einsum("sh,hod->sod", members.to(maps.dtype), maps), ord=2)


def _ordered(weights: Tensor, subsets: Tensor) -> Tensor:
    r"""The sum over nested subsets of :math:`(\beta_{(k)} - \beta_{(k+1)})` times the subset's norm."""
    ranked, order = weights.sort(dim=-1, descending=True)
    drops = ranked - torch.cat([ranked[..., 1:], torch.zeros_like(ranked[..., :1])], dim=-1)
    codes = torch.cumsum(1 << order, dim=-1)
    return (drops * subsets[codes]).sum(dim=-1)
