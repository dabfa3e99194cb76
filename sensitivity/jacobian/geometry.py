r"""What the norm maps need of a layer and a row of queries, without any block.

Notation of two heads ``h`` and ``g``: :math:`G^{hg} = W_O^{hT} W_O^g`, :math:`w_h(i) = c W_K^{hT} q^h_i`,
:math:`t^{hg}_i = G^{gh} W_V^h w_g(i)`, :math:`\omega^{hg}_i = w_h(i) \cdot w_g(i)`. Every inner product of two paths of
two heads is a bilinear form in the head width with one of these matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention


class Features(NamedTuple):
    r"""Features of some rows or keys; the product of a row's with a key's is a bracket.

    Attributes:
        own: of every head with itself, ``(head, sample, row, feature)`` or ``(head, sample, feature, key)``.
        cross: of every two heads ``h < g``, in the order of ``Geometry.first`` and ``second``.
        squares: :math:`\|W_O^h v^h\|^2` of the key's value or of the row's mean, ``(head, sample, row, 1)`` or
            ``(head, sample, 1, key)``.
    """

    own: Float[Tensor, "head sample *features"]
    cross: Float[Tensor, "pair sample *features"]
    squares: Float[Tensor, "head sample *single"]


@dataclass(frozen=True)
class Geometry:
    """The token-independent inner products of a layer's heads.

    Attributes:
        first: head ``h`` of each pair ``h < g``, ``(pair,)``.
        second: head ``g`` of each pair, ``(pair,)``.
        outputs: :math:`G^{hg}`.
        values: :math:`<M_h, M_g>_F` with :math:`M_h = W_O^h W_V^h`.
        turned: :math:`c W_K^g W_V^{hT} G^{hg}`, which takes :math:`q^g_i` to :math:`t^{hg}_i`.
        keys: :math:`c^2 W_K^h W_K^{gT}`.
    """

    first: Int[Tensor, " pair"]
    second: Int[Tensor, " pair"]
    outputs: Float[Tensor, "head head value_width value_width"]
    values: Float[Tensor, "head head"]
    turned: Float[Tensor, "head head width value_width"]
    keys: Float[Tensor, "head head width width"]

    @classmethod
    def of(cls, attention: SoftmaxAttention) -> Geometry:
        """The geometry of ``attention``."""
        first, second = torch.triu_indices(attention.heads, attention.heads, offset=1, device=attention.device)
        w_k, w_v = (attention.scale * attention.key_weight).flatten(0, 1), attention.value_weight.flatten(0, 1)
        w_o = attention.output_weight.movedim(0, 1).flatten(1)
        widths = (attention.heads, attention.value_weight.shape[1]), (attention.heads, attention.width)

        def of_pairs(products: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
            return products.view(*rows, *columns).transpose(1, 2)

        outputs = of_pairs(w_o.mT @ w_o, widths[0], widths[0])
        values = of_pairs(w_v @ w_v.mT, widths[0], widths[0])
        return cls(
            first=first,
            second=second,
            outputs=outputs,
            values=(outputs * values).sum(dim=(-2, -1)),
            turned=of_pairs(w_v @ w_k.mT, widths[0], widths[1]).mT @ outputs,
            keys=of_pairs(w_k @ w_k.mT, widths[1], widths[1]),
        )

    @cached_property
    def _on_query(self) -> Float[Tensor, "head other width forms"]:
        r"""What takes :math:`q^g` to :math:`2 t^{hg}` and :math:`c^2 W_K^h W_K^{gT} q^g`, for heads ``g`` and ``h``."""
        return torch.cat([2 * self.turned.transpose(0, 1), self.keys], dim=3)

    def _put_out(
        self, value: Float[Tensor, "head sample time value_width"]
    ) -> Float[Tensor, "head other sample time value_width"]:
        r""":math:`G^{gh} v^h` for every head ``h`` and every other ``g``."""
        return value[:, None] @ self.outputs[:, :, None]

    def columns(self, value: Float[Tensor, "sample head key value_width"]) -> Features:
        r"""Column features :math:`[v^h_j, 1, v^h_j G^{hh} v^h_j]` and :math:`[v^g_j, v^h_j, 1, v^h_j G^{hg} v^g_j]`."""
        value = value.transpose(0, 1)
        forms = (self._put_out(value) * value).sum(dim=4)
        squares, cross = forms.diagonal().movedim(-1, 0)[:, :, None], forms[self.first, self.second][:, :, None]
        value = value.mT
        first, second, one = value[self.first], value[self.second], value.new_ones(())
        return Features(
            torch.cat([value, one.expand_as(squares), squares], dim=2),
            torch.cat([second, first, one.expand_as(cross), cross], dim=2),
            squares,
        )

    def rows(
        self,
        query: Float[Tensor, "sample head row width"],
        mean: Float[Tensor, "sample head row value_width"],
        value_path: bool = True,
    ) -> Features:
        r"""Row features whose inner product with ``columns`` is the bracket of two heads.

        .. math::

            \langle M_h + (u^h_j - \bar u^h_i) w_h^T, M_g + (u^g_j - \bar u^g_i) w_g^T \rangle

        and that of ``g`` and ``h`` added to it for ``h < g``, so that a sum over ``h <= g`` is the whole.

        Args:
            query: :math:`q_i`.
            mean: :math:`\bar v_i`, the weighted mean of the values.
            value_path: False leaves :math:`M` out: the bracket of the key path alone.
        """
        width = mean.shape[3]
        query, mean = query.transpose(0, 1), mean.transpose(0, 1)
        # of heads g and h: (g, h, sample, row, feature)
        turned, keyed = (query[:, None] @ self._on_query[:, :, None]).tensor_split((width,), dim=4)
        omega = (keyed * query).sum(dim=4, keepdim=True)
        output = self._put_out(mean)
        values = self.values[:, :, None, None, None]
        if not value_path:
            turned, values = torch.zeros_like(turned), torch.zeros_like(values)
        on_value = torch.addcmul(turned, omega, output.transpose(0, 1), value=-2)
        constant = values - ((turned + on_value) * (mean / 2)[:, None]).sum(dim=4, keepdim=True)
        every = torch.cat([on_value, constant, omega], dim=4)
        below, above = every[self.second, self.first], every[self.first, self.second]
        cross = [below[..., :width], above[..., :width], below[..., width:] + above[..., width:]]
        squares = (output.diagonal().movedim(-1, 0) * mean).sum(dim=3, keepdim=True)
        return Features(every.diagonal().movedim(-1, 0), torch.cat(cross, dim=3), squares)

    def explicit(
        self,
        query: Float[Tensor, "head pixel width"],
        value: Float[Tensor, "head pixel"],
        deviation: Float[Tensor, "head pixel value_width"],
        value_path: bool = True,
    ) -> Float[Tensor, " pixel"]:
        r"""Squared norms of single blocks, from their deviations.

        Slower than ``rows`` and ``columns`` and without their cancellation: for blocks whose deviation
        :math:`r^h_{ij} = \alpha^h v^h_j - a^h o^h_i` is small beside its two terms, and where dropout separates
        :math:`\alpha = m a` from :math:`a`.

        Args:
            query: :math:`q_i` of each block's row.
            value: :math:`\alpha^h_{ij}`.
            deviation: :math:`r^h_{ij}`.
            value_path: False leaves :math:`M` out.
        """
        every = torch.arange(len(query), device=query.device)
        first, second = torch.cat([every, self.first]), torch.cat([every, self.second])
        left, right = deviation[first], deviation[second]
        omega = _form(query[first], self.keys[first, second], query[second])
        squares = omega * _form(left, self.outputs[first, second], right)
        if value_path:
            squares = squares + (value[first] * value[second] * self.values[first, second, None])[..., None]
            squares = squares + value[first][..., None] * _form(query[second], self.turned[first, second], right)
            squares = squares + value[second][..., None] * _form(query[first], self.turned[second, first], left)
        return squares[: len(every), :, 0].sum(dim=0) + 2 * squares[len(every) :, :, 0].sum(dim=0)

    def only(self, heads: slice) -> Geometry:
        """The geometry of all heads (``slice(None)``) or of one alone."""
        if heads == slice(None):
            return self
        none, own = self.first[:0], (heads, heads)
        return Geometry(none, none, self.outputs[own], self.values[own], self.turned[own], self.keys[own])

    def value_squares(self, value: Float[Tensor, "sample head key value_width"]) -> Float[Tensor, "head sample 1 key"]:
        r""":math:`\|W_O^h v^h\|^2` of each head's values."""
        return _form(value, self.outputs.diagonal().movedim(-1, 0), value).movedim(1, 0).mT


def _form(left: Tensor, matrix: Tensor, right: Tensor) -> Float[Tensor, "*axes 1"]:
    """The bilinear form of pairs of vectors."""
    return ((left @ matrix) * right).sum(dim=-1, keepdim=True)
