"""Multi-head softmax attention over time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from sensitivity import diagonal_bias
from sensitivity.attention import SoftmaxAttention
from sensitivity.checks import head_width
from sensitivity.errors import InputError
from sensitivity.layers.diagonal import Diagonal, DiagonalDropout
from sensitivity.layers.dropout import Dropout, dropout
from sensitivity.layers.gate import ResidualGate


@dataclass(frozen=True)
class Draw:
    """What one training pass sampled inside an attention layer; both parts broadcast to (sample, head, query, key).

    Attributes:
        bias: ``-inf`` on the diagonal logits that were dropped, 0 elsewhere; None if nothing was.
        multiplier: factors on the weights after the softmax; None if all are 1.
    """

    bias: Float[Tensor, "#sample #head query key"] | None = None
    multiplier: Float[Tensor, "#sample #head query key"] | None = None


class Mask(NamedTuple):
    """The additive mask of a call, or None; whether the kernel itself is to be causal; the rows without any key."""

    bias: Tensor | None
    causal: bool
    empty: Tensor | None


class TemporalAttention(nn.Module):
    r"""Self-attention over time, for tokens ``(..., time, dim)``.

    .. math::

        h_i = \gamma x_i + \mathrm{Dropout}\Big(\sum_h W_O \sum_j a_{ij} (W_V x_j + b_V) + b_O + u_i\Big), \qquad
        a_i = \mathrm{softmax}_j\big(\langle q_i, k_j \rangle / \sqrt{d} + B_{ij}\big)

    with an optional offset :math:`u`. Any length is taken: the layer knows no positions. Fused kernels are used
    unless weights are asked for, sampled factors act on them, or the rows are so short that plain products on a CPU are
    faster; both routes give the same numbers. Where a diagonal
    regulariser would hide the only visible key of a row, that key stays visible, so outputs and gradients are finite
    for one token and for the first row of a causal layer. A sample that is padding throughout attends to nothing: its
    weights are zero.

    Args:
        dim: features of a token.
        heads: number of heads; must divide ``dim``.
        diagonal: a regulariser of the diagonal, or None.
        residual: True adds :math:`x_i`, False does not, and a ``ResidualGate`` adds it times :math:`\gamma`.
        causal: hides every key after the query.
        dropout: dropout of the weights, after the softmax.
        output_dropout: dropout of the output (offset included), before the residual.

    Raises:
        InputError: ``dim`` is not divisible by ``heads``, a dropout is not in [0, 1), or a learned penalty is for
            another number of heads.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        diagonal: Diagonal | None = None,
        residual: bool | ResidualGate = True,
        causal: bool = False,
        dropout: float = 0.0,
        *,
        output_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width = head_width(dim, heads)
        self.dim, self.heads, self.residual, self.causal = dim, heads, residual, causal
        if diagonal is not None and not isinstance(diagonal, Diagonal):
            raise InputError(
                f"diagonal must be a DiagonalMask, DiagonalDropout, DiagonalPenalty or None, not {diagonal!r}."
            )
        if diagonal is not None and isinstance(diagonal.bias, Tensor) and len(diagonal.bias) != heads:
            raise InputError(f"the penalty is learned for {len(diagonal.bias)} heads, but the layer has {heads}.")
        self.diagonal = diagonal
        self.projection = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)
        self.attention_dropout = Dropout(dropout, "dropout")
        self.output_dropout = Dropout(output_dropout, "output_dropout")

    def forward(
        self,
        tokens: Float[Tensor, "*batch time dim"],
        offset: Tensor | None = None,
        need_weights: bool = False,
        *,
        padding: Bool[Tensor, "*batch time"] | None = None,
        draw: Draw | None = None,
    ) -> Float[Tensor, "*batch time dim"] | tuple[Float[Tensor, "*batch time dim"], Tensor]:
        """Attends over the last axis but one.

        Args:
            tokens: ``(..., time, dim)``.
            offset: added to the attention output before its dropout and the residual; broadcasts to ``tokens``.
            need_weights: also return the weights ``(..., head, query, key)`` after the softmax, before any dropout.
            padding: True at padded positions ``(..., time)``; they are hidden as keys.
            draw: what to sample, given in advance by ``draw``; None samples anew in training.

        Raises:
            InputError: tokens of another width than ``dim``, or no time step at all.
        """
        length = self._length(tokens)
        query, key, value = self._project(tokens.reshape(-1, length, self.dim))
        padding = None if padding is None else padding.reshape(-1, length)
        rate = self.attention_dropout.p if self.attention_dropout.training and draw is None else 0.0
        draw = self._draw_diagonal(query, padding) if draw is None else draw
        mask = self._mask(length, padding, draw, query)
        plain = need_weights or draw.multiplier is not None or _is_short(query)
        weights = self._weights(query, key, mask) if plain else None
        if weights is None:
            mixed = _fused(query, key, value, mask, rate)
        else:
            used = weights if draw.multiplier is None else weights * draw.multiplier
            mixed = dropout(used, rate) @ value
        out = self.output(mixed.transpose(1, 2).reshape(tokens.shape))
        out = self.output_dropout(out if offset is None else out + offset)
        out = self._with_residual(tokens, out)
        if not need_weights or weights is None:
            return out
        return out, weights.reshape(*tokens.shape[:-2], self.heads, length, length)

    def draw(
        self,
        tokens: Float[Tensor, "*batch time dim"],
        *,
        padding: Bool[Tensor, "*batch time"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """One draw of everything that training samples inside the softmax attention, for these tokens.

        Args:
            tokens: only their shape, type and device matter.
            padding: as in ``forward``.
            generator: the source of randomness; the global one by default, as in every dropout layer.

        Returns:
            The draw: ``layer(tokens, draw=draw)`` uses it, and ``softmax_attention(bias=draw.bias,
            multiplier=draw.multiplier)`` describes the layer under it.
        """
        length = self._length(tokens)
        like = tokens.reshape(-1, 1, length, self.dim).expand(-1, self.heads, -1, -1)
        padding = None if padding is None else padding.reshape(-1, length)
        drawn = self._draw_diagonal(like, padding, generator, always=True)
        rate, multiplier = self.attention_dropout.p, drawn.multiplier
        if rate > 0:
            shape = (like.shape[0], self.heads, length, length)
            kept = torch.rand(shape, device=tokens.device, generator=generator) >= rate
            factors = kept.to(tokens.dtype) / (1 - rate)
            multiplier = factors if multiplier is None else factors * multiplier
        return Draw(drawn.bias, multiplier)

    def softmax_attention(
        self,
        *,
        bias: Tensor | None = None,
        multiplier: Tensor | None = None,
        padding: Bool[Tensor, "*batch time"] | None = None,
        graph: bool = False,
    ) -> SoftmaxAttention:
        """The layer as it acts in evaluation (without an offset), or under a draw of what training samples.

        Args:
            bias: additive part of a draw, ``(sample, head, query, key)``.
            multiplier: post-softmax factors of a draw, ``(sample, head, query, key)``.
            padding: True at padded positions; leading axes are folded into ``sample``.
            graph: keep the graph of the weights (a learned gate is a number all the same).
        """

        def kept(value: Any) -> Any:
            return value if graph or not isinstance(value, Tensor) else value.detach()

        packed = kept(self.projection.weight).reshape(3, self.heads, self.width, self.dim)
        biases = kept(self.projection.bias).reshape(3, self.heads, self.width)
        output = kept(self.output.weight).reshape(self.dim, self.heads, self.width).transpose(0, 1)
        return SoftmaxAttention(
            query_weight=packed[0],
            key_weight=packed[1],
            value_weight=packed[2],
            output_weight=output,
            query_bias=biases[0],
            key_bias=biases[1],
            value_bias=biases[2],
            output_bias=kept(self.output.bias),
            bias=bias,
            causal=self.causal,
            diagonal_bias=0.0 if self.diagonal is None else kept(self.diagonal.bias),
            diagonal_length=None if self.diagonal is None else self.diagonal.length,
            padding=None if padding is None else padding.reshape(-1, padding.shape[-1]),
            residual=self.residual.factor if isinstance(self.residual, ResidualGate) else self.residual,
            multiplier=multiplier,
        )

    def extra_repr(self) -> str:
        """What ``repr`` shows before the submodules."""
        return f"dim={self.dim}, heads={self.heads}, residual={self.residual}, causal={self.causal}"

    # -- helpers -------------------------------------------------------------------------------------------------

    def _length(self, tokens: Tensor) -> int:
        if tokens.shape[-1] != self.dim:
            raise InputError(f"tokens have {tokens.shape[-1]} features, but the layer takes {self.dim}.")
        if tokens.numel() == 0:
            raise InputError(f"tokens are empty: shape {tuple(tokens.shape)}; every axis needs at least one entry.")
        return tokens.shape[-2]

    def _with_residual(self, tokens: Tensor, out: Tensor) -> Tensor:
        if isinstance(self.residual, ResidualGate):
            return self.residual(tokens) + out
        return tokens + out if self.residual else out

    def _project(self, tokens: Float[Tensor, "sample time dim"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``(sample, head, time, width)`` each."""
        packed = self.projection(tokens).reshape(*tokens.shape[:2], 3, self.heads, self.width)
        query, key, value = packed.permute(2, 0, 3, 1, 4).contiguous()
        return query, key, value

    def _draw_diagonal(
        self,
        like: Float[Tensor, "sample head time width"],
        padding: Tensor | None,
        generator: torch.Generator | None = None,
        always: bool = False,
    ) -> Draw:
        """A draw of the diagonal regulariser, if it is in training (or ``always``)."""
        if not isinstance(self.diagonal, DiagonalDropout) or not (self.diagonal.training or always):
            return Draw()
        samples, heads, length, _ = like.shape
        eye = torch.eye(length, dtype=torch.bool, device=like.device)
        hidden = self.diagonal.sample_hidden(samples, heads, length, like.device, generator)
        factors = self.diagonal.sample_multiplier(samples, heads, length, like, generator)
        bias = multiplier = None
        if hidden is not None:
            gone = hidden & _has_others(self._visible(length, padding, like.device), eye)
            bias = like.new_zeros(*gone.shape, length)
            bias.diagonal(dim1=-2, dim2=-1).masked_fill_(gone, -math.inf)
        if factors is not None:
            multiplier = like.new_ones(*factors.shape, length)
            multiplier.diagonal(dim1=-2, dim2=-1).copy_(factors)
        return Draw(bias, multiplier)

    def _visible(self, length: int, padding: Tensor | None, device: torch.device) -> Bool[Tensor, "#s #h query key"]:
        """Which pairs causality and padding leave visible."""
        visible = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
        visible = visible.tril() if self.causal else visible
        return visible if padding is None else visible & ~padding[:, None, None, :]

    def _mask(self, length: int, padding: Tensor | None, draw: Draw, like: Tensor) -> Mask:
        constant, reference = (0.0, None) if self.diagonal is None else (self.diagonal.bias, self.diagonal.length)
        penalised = diagonal_bias.adds(constant, reference)
        if not (penalised or constant == -math.inf) and draw.bias is None and padding is None:
            return Mask(None, self.causal, None)
        visible = self._visible(length, padding, like.device)
        eye = torch.eye(length, dtype=torch.bool, device=like.device)
        if not penalised and constant == -math.inf:
            visible = visible & ~(_has_others(visible, eye)[..., None] & eye)
        empty = None
        if padding is not None:
            empty = ~visible.any(dim=-1, keepdim=True)
            visible = visible | empty
        bias = torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill(~visible, -math.inf)
        if penalised:
            penalty = diagonal_bias.of_rows(constant, reference, eye, ~visible, bias.dtype)
            bias = bias + penalty[..., None] * eye
        return Mask(bias if draw.bias is None else bias + draw.bias.to(like.dtype), False, empty)

    def _weights(self, query: Tensor, key: Tensor, mask: Mask) -> Float[Tensor, "sample head query key"]:
        scores = (query * (1 / math.sqrt(self.width))) @ key.mT
        if mask.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        if mask.bias is not None:
            scores = scores + mask.bias
        weights = torch.softmax(scores, dim=-1)
        return weights if mask.empty is None else weights.masked_fill(mask.empty, 0.0)


def _is_short(query: Float[Tensor, "sample head time width"]) -> bool:
    """Whether plain products are the faster way: on a CPU, for rows of scores no longer than a token's q, k and v."""
    return query.device.type == "cpu" and query.shape[2] <= 3 * query.shape[3]


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, rate: float
) -> Float[Tensor, "sample head time width"]:
    """Attention by torch's fused kernels, where there is one for the mask and the device."""
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask.bias, dropout_p=rate, is_causal=mask.causal
    )
    return mixed if mask.empty is None else mixed.masked_fill(mask.empty, 0.0)


def _has_others(
    visible: Bool[Tensor, "#sample #head time time"], eye: Bool[Tensor, "time time"]
) -> Bool[Tensor, "#sample #head time"]:
    """The rows that see another key than their own: only there may the diagonal be hidden."""
    return (visible & ~eye).any(dim=-1)
