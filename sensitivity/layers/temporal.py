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
from sensitivity.layers.dropout import Dropout, branch, dropout, factors
from sensitivity.layers.gate import ResidualGate
from sensitivity.layers.short import is_plain, short_attention


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
        if not need_weights and padding is None and draw is None and _swapped(tokens, offset):
            offset = None if offset is None else offset.transpose(0, 1)
            out: Any = self.forward(tokens.transpose(0, 1), offset)
            return out.transpose(0, 1)
        flat = tokens.reshape(-1, length, self.dim)
        padding = None if padding is None else padding.reshape(-1, length)
        rate = self.attention_dropout.p if self.attention_dropout.training and draw is None else 0.0
        chosen = self._draw_diagonal(flat, padding) if draw is None else draw
        mask = self._mask(length, padding, chosen, flat)
        packed = self.projection(flat)
        if draw is None and not need_weights and self._has_kernel(packed, mask):
            # what acts on the maps here is symmetric (diagonal biases and factors) or drawn entry by entry
            kept = _product(chosen.multiplier, rate, (len(flat), self.heads, length, length), packed)
            mixed = short_attention(packed, self.heads, mask.bias, kept)
            rate = self.output_dropout.p if self.output_dropout.training else 0.0
            rows, skip = self.output(mixed.flatten(0, 1)), self._skip(tokens)  # no view, so it can be written to
            added = [None if part is None else part.expand(tokens.shape).reshape(rows.shape) for part in (offset, skip)]
            return branch(rows, added[0], rate, added[1]).reshape(tokens.shape)
        plain = need_weights or chosen.multiplier is not None or self._is_short(packed)
        mixed, weights = self._attend(packed, mask, chosen.multiplier, rate, plain)
        out = self.output(mixed.reshape(tokens.shape))
        out = self.output_dropout(out if offset is None else out + offset)
        skip = self._skip(tokens)
        out = out if skip is None else skip + out
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
        like = tokens.reshape(-1, length, self.dim)
        padding = None if padding is None else padding.reshape(-1, length)
        drawn = self._draw_diagonal(like, padding, generator, always=True)
        rate, multiplier = self.attention_dropout.p, drawn.multiplier
        if rate > 0:
            shape = (like.shape[0], self.heads, length, length)
            kept = torch.rand(shape, device=tokens.device, generator=generator) >= rate
            scaled = kept.to(tokens.dtype) / (1 - rate)
            multiplier = scaled if multiplier is None else scaled * multiplier
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

    def _skip(self, tokens: Tensor) -> Tensor | None:
        """What the residual path adds."""
        if isinstance(self.residual, ResidualGate):
            return self.residual(tokens)
        return tokens if self.residual else None

    def _is_short(self, packed: Float[Tensor, "sample time packed"]) -> bool:
        """Whether plain products are the faster way: on a CPU, for rows no longer than a token's q, k and v."""
        return packed.device.type == "cpu" and packed.shape[1] <= 3 * self.width

    def _has_kernel(self, packed: Float[Tensor, "sample time packed"], mask: Mask) -> bool:
        """Whether the kernel of training can be used: on a CPU, under no transform; nobody holds what it writes to."""
        biased = mask.bias is not None and mask.bias.requires_grad
        masked = self.causal or mask.empty is not None or biased
        if masked or not (self.training and packed.requires_grad and self._is_short(packed)):
            return False
        return _is_bare(self.output) and is_plain(packed, *self.output.parameters())

    def _attend(
        self,
        packed: Float[Tensor, "sample time packed"],
        mask: Mask,
        multiplier: Tensor | None,
        rate: float,
        plain: bool,
    ) -> tuple[Float[Tensor, "sample time dim"], Tensor | None]:
        """The heads' outputs side by side, and the weights where plain products gave them."""
        parts = packed.reshape(*packed.shape[:2], 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        query, key, value = parts.contiguous()
        if not plain:
            return _fused(query, key, value, mask, rate).transpose(1, 2).flatten(2), None
        weights = self._weights(query, key, mask)
        used = weights if multiplier is None else weights * multiplier
        return (dropout(used, rate) @ value).transpose(1, 2).flatten(2), weights

    def _draw_diagonal(
        self,
        like: Float[Tensor, "sample time dim"],
        padding: Tensor | None,
        generator: torch.Generator | None = None,
        always: bool = False,
    ) -> Draw:
        """A draw of the diagonal regulariser, if it is in training (or ``always``)."""
        if not isinstance(self.diagonal, DiagonalDropout) or not (self.diagonal.training or always):
            return Draw()
        samples, length, _ = like.shape
        heads = self.heads
        eye = torch.eye(length, dtype=torch.bool, device=like.device)
        hidden = self.diagonal.sample_hidden(samples, heads, length, like.device, generator)
        scaled = self.diagonal.sample_multiplier(samples, heads, length, like, generator)
        bias = multiplier = None
        if hidden is not None:
            gone = hidden & _has_others(self._visible(length, padding, like.device), eye)
            bias = like.new_zeros(*gone.shape, length)
            bias.diagonal(dim1=-2, dim2=-1).masked_fill_(gone, -math.inf)
        if scaled is not None:
            multiplier = like.new_ones(*scaled.shape, length)
            multiplier.diagonal(dim1=-2, dim2=-1).copy_(scaled)
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


def _swapped(tokens: Tensor, offset: Tensor | None) -> bool:
    """Whether tokens ``(batch, node, time, dim)`` lie in memory with the nodes first."""
    if tokens.ndim != 4 or tokens.is_contiguous() or (offset is not None and offset.ndim != 4):
        return False
    return tokens.transpose(0, 1).is_contiguous()


def _is_bare(module: nn.Module) -> bool:
    """Whether a linear layer is nothing but that: no other class in its place, and no hook that sees its output."""
    hooks = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is nn.Linear and not any(hooks)


def _product(multiplier: Tensor | None, rate: float, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """The factors on the weights: those of dropout times those that are given."""
    if rate == 0:
        return multiplier
    drawn = factors(torch.Size(shape), rate, like.dtype)
    return drawn if multiplier is None else drawn.mul_(multiplier)


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
