r"""What the norm maps need of a layer and a row of queries, without any block.

Notation of one head pair ``(h, g)``: :math:`G^{hg} = W_O^{hT} W_O^g`, :math:`w_h(i) = c W_K^{hT} q^h_i`,
:math:`z^{hg}_i = W_V^h w_g(i)`, :math:`\omega^{hg}_i = w_h(i) \cdot w_g(i)`. Every inner product of two paths of two
heads is a bilinear form in the head width with one of these matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention


@dataclass(frozen=True)
class Geometry:
    """The token-independent inner products of a layer, for the head pairs ``h <= g``.

    Attributes:
        first: head ``h`` of each pair, ``(pair,)``.
        second: head ``g`` of each pair, ``(pair,)``.
        outputs: :math:`G^{hg}`, ``(pair, value_width, value_width)``.
        values: :math:`<M_h, M_g>_F` with :math:`M_h = W_O^h W_V^h`, ``(pair,)``.
        forward: :math:`c W_V^h W_K^{gT}`, ``(pair, value_width, width)``.
        backward: :math:`c W_V^g W_K^{hT}`, ``(pair, value_width, width)``.
        keys: :math:`c^2 W_K^h W_K^{gT}`, ``(pair, width, width)``.
    """

    first: Int[Tensor, " pair"]
    second: Int[Tensor, " pair"]
    outputs: Float[Tensor, "pair value_width value_width"]
    values: Float[Tensor, " pair"]
    forward: Float[Tensor, "pair value_width width"]
    backward: Float[Tensor, "pair value_width width"]
    keys: Float[Tensor, "pair width width"]

    @classmethod
    def of(cls, attention: SoftmaxAttention) -> Geometry:
        """The geometry of ``attention``."""
        first, second = torch.triu_indices(attention.heads, attention.heads, device=attention.device)
        scale = attention.scale
        w_k, w_v, w_o = attention.key_weight, attention.value_weight, attention.output_weight
        outputs = w_o[first].mT @ w_o[second]
        return cls(
            first=first,
            second=second,
            outputs=outputs,
            values=((outputs @ w_v[second]) * w_v[first]).sum(dim=(-2, -1)),
            forward=scale * w_v[first] @ w_k[second].mT,
            backward=scale * w_v[second] @ w_k[first].mT,
            keys=scale**2 * w_k[first] @ w_k[second].mT,
        )

    def columns(self, value: Float[Tensor, "sample head key value_width"]) -> Float[Tensor, "sample pair key features"]:
        """Column features of every key: :math:`[v^h_j, v^g_j, 1, v^h_j G^{hg} v^g_j]`."""
        first, second = value[:, self.first], value[:, self.second]
        ones = torch.ones_like(first[..., :1])
        square = ((first @ self.outputs) * second).sum(dim=-1, keepdim=True)
        return torch.cat([first, second, ones, square], dim=-1)

    def rows(
        self,
        query: Float[Tensor, "sample head row width"],
        mean: Float[Tensor, "sample head row value_width"],
        value_path: bool = True,
    ) -> Float[Tensor, "sample pair row features"]:
        r"""Row features whose inner product with ``columns`` is the bracket of one head pair.

        .. math::

            \langle M_h + (u^h_j - \bar u^h_i) w_h^T, M_g + (u^g_j - \bar u^g_i) w_g^T \rangle

        times two for ``h < g``, so that a sum over ``h <= g`` is the whole.

        Args:
            query: :math:`q_i`.
            mean: :math:`\bar v_i`, the weighted mean of the values.
            value_path: False leaves :math:`M` out: the bracket of the key path alone.
        """
        forward, backward = query[:, self.second] @ self.forward.mT, query[:, self.first] @ self.backward.mT
        if not value_path:
            forward, backward = torch.zeros_like(forward), torch.zeros_like(backward)
        omega = self.products(query)
        first, second = mean[:, self.first], mean[:, self.second]
        on_second = (forward - omega * first) @ self.outputs
        on_first = (backward - omega * second) @ self.outputs.mT
        constant = -(on_second * second).sum(-1) - ((backward @ self.outputs.mT) * first).sum(-1)
        if value_path:
            constant = constant + self.values[:, None]
        features = torch.cat([on_first, on_second, constant[..., None], omega], dim=-1)
        return features * self._multiplicity()

    def explicit(
        self,
        query: Float[Tensor, "head pixel width"],
        value: Float[Tensor, "head pixel"],
        deviation: Float[Tensor, "head pixel value_width"],
        value_path: bool = True,
    ) -> Float[Tensor, "pair pixel"]:
        r"""Contribution of each head pair to the squared norm of single blocks, from their deviations.

        Slower than ``rows`` and ``columns`` and without their cancellation: for blocks whose deviation
        :math:`r^h_{ij} = \alpha^h v^h_j - a^h o^h_i` is small beside its two terms, and where dropout separates
        :math:`\alpha = m a` from :math:`a`.

        Args:
            query: :math:`q_i` of each block's row.
            value: :math:`\alpha^h_{ij}`.
            deviation: :math:`r^h_{ij}`.
            value_path: False leaves :math:`M` out.
        """
        first, second = deviation[self.first], deviation[self.second]
        omega = ((query[self.first] @ self.keys) * query[self.second]).sum(dim=-1)
        squares = omega * ((first @ self.outputs) * second).sum(dim=-1)
        if value_path:
            forward, backward = query[self.second] @ self.forward.mT, query[self.first] @ self.backward.mT
            left, right = value[self.first], value[self.second]
            squares = squares + left * right * self.values[:, None]
            squares = squares + left * ((forward @ self.outputs) * second).sum(dim=-1)
            squares = squares + right * ((backward @ self.outputs.mT) * first).sum(dim=-1)
        return squares * self._multiplicity()[:, 0]

    def only(self, head: int) -> Geometry:
        """The geometry of one head alone."""
        own = (self.first == head) & (self.second == head)
        zero = torch.zeros_like(self.first[own])
        cut = (self.outputs, self.values, self.forward, self.backward, self.keys)
        return Geometry(zero, zero, *(part[own] for part in cut))

    def products(self, query: Float[Tensor, "sample head row width"]) -> Float[Tensor, "sample pair row 1"]:
        r""":math:`\omega^{hg}_i = w_h(i) \cdot w_g(i)`."""
        return ((query[:, self.first] @ self.keys) * query[:, self.second]).sum(dim=-1, keepdim=True)

    def _multiplicity(self) -> Float[Tensor, "pair 1 1"]:
        """How often a pair stands in the double sum over heads: once on its diagonal, else twice."""
        twice = (self.first != self.second).to(self.values.dtype)
        return (1 + twice)[:, None, None]
