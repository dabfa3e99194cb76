"""``torch.nn.MultiheadAttention`` as a :class:`~sensitivity.attention.SoftmaxAttention`."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sensitivity import checks
from sensitivity.attention import SoftmaxAttention
from sensitivity.describers import register
from sensitivity.errors import InputError


@register(nn.MultiheadAttention)
def describe(
    module: nn.MultiheadAttention,
    *,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    visible: Bool[Tensor, "*batch query key"] | None = None,
) -> SoftmaxAttention:
    """Describes the layer as self-attention in evaluation; it adds no residual.

    Packed and separate projections are read, with or without biases, whatever ``batch_first`` says (a description
    always takes ``(sample, time, feature)``).

    Args:
        module: the layer; its weights are detached, not copied.
        attn_mask: as in torch: boolean with **True = hidden**, or numbers that are added to the scores; ``(query,
            key)`` or ``(sample * head, query, key)``.
        key_padding_mask: as in torch: boolean with **True = padding**, or numbers that are added to the keys' scores;
            ``(sample, key)``.
        is_causal: hides every key after the query. In torch it is a hint beside ``attn_mask``; here it acts by itself.
        visible: the opposite meaning, as ``scaled_dot_product_attention`` has it: boolean with **True = visible**;
            ``(query, key)``, or broadcast to ``(sample, head, query, key)``.

    Raises:
        InputError: ``add_bias_kv`` or ``add_zero_attn``, which add tokens that are at no time step; a subclass with a
            forward of its own; masks of another kind or shape.
    """
    _check_kind(module)
    query, key, value = _input_weights(module)
    heads = module.num_heads
    biases: list[Tensor] | list[None] = [None] * 3
    if module.in_proj_bias is not None:
        biases = [_per_head(part, heads) for part in module.in_proj_bias.detach().chunk(3)]
    output = module.out_proj
    bias = _sum(_additive(attn_mask, "attn_mask", query), _additive(_hidden(visible), "visible", query))
    padding, padding_bias = _padding(key_padding_mask, query)
    return SoftmaxAttention(
        query_weight=_per_head(query, heads),
        key_weight=_per_head(key, heads),
        value_weight=_per_head(value, heads),
        output_weight=output.weight.detach().unflatten(1, (heads, -1)).transpose(0, 1),
        query_bias=biases[0],
        key_bias=biases[1],
        value_bias=biases[2],
        output_bias=None if output.bias is None else output.bias.detach(),
        bias=_sum(_by_head(bias, heads), padding_bias),
        causal=bool(is_causal),
        padding=padding,
    )


def _check_kind(module: nn.MultiheadAttention) -> None:
    if module.bias_k is not None or module.bias_v is not None:
        raise InputError(
            "nn.MultiheadAttention(add_bias_kv=True) adds a learned key that is at no time step; measure it with "
            "backend='autodiff', or build the layer without it."
        )
    if module.add_zero_attn:
        raise InputError(
            "nn.MultiheadAttention(add_zero_attn=True) adds a zero key that is at no time step; measure it with "
            "backend='autodiff', or build the layer without it."
        )
    if type(module).forward is not nn.MultiheadAttention.forward:
        raise InputError(
            f"{type(module).__name__} has a forward of its own, which may follow another formula; "
            "give the class a softmax_attention() method, or measure it with backend='autodiff'."
        )


def _input_weights(module: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value weights, ``(embed, in)`` each."""
    if module.in_proj_weight is not None:
        query, key, value = module.in_proj_weight.detach().chunk(3)
        return query, key, value
    return module.q_proj_weight.detach(), module.k_proj_weight.detach(), module.v_proj_weight.detach()


def _per_head(value: Tensor, heads: int) -> Tensor:
    return value.unflatten(0, (heads, -1))


def _hidden(visible: Tensor | None) -> Tensor | None:
    if visible is None:
        return None
    if visible.dtype != torch.bool:
        raise InputError(f"visible must be a boolean mask, True where a key is visible, not {visible.dtype}.")
    return ~visible


def _additive(mask: Tensor | None, name: str, like: Tensor) -> Float[Tensor, "..."] | None:
    """A mask with True = hidden, or numbers, as numbers to be added."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, -math.inf)
    if not mask.is_floating_point():
        raise InputError(f"{name} must be boolean (True = hidden) or floating point, not {mask.dtype}.")
    if mask.ndim < 2:
        raise InputError(f"{name} must have the axes (query, key), not the shape {tuple(mask.shape)}.")
    return mask.detach().to(dtype=like.dtype, device=like.device)


def _by_head(bias: Tensor | None, heads: int) -> Tensor | None:
    """Splits ``(sample * head, query, key)`` into its samples and heads."""
    if bias is None or bias.ndim != 3:
        return bias
    if bias.shape[0] % heads:
        raise InputError(
            f"a mask of three axes is (sample * head, query, key); its {bias.shape[0]} is no multiple of {heads} heads."
        )
    return bias.unflatten(0, (-1, heads))


def _padding(mask: Tensor | None, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The padding that a key padding mask means, and what else it adds to the scores."""
    if mask is None:
        return None, None
    mask = mask if mask.ndim == 2 else mask.reshape(-1, mask.shape[-1])
    if mask.dtype == torch.bool:
        return checks.padding(mask, *mask.shape), None
    if not mask.is_floating_point():
        raise InputError(f"key_padding_mask must be boolean (True = padding) or floating point, not {mask.dtype}.")
    hidden = torch.isneginf(mask)
    padding = checks.padding(hidden, *mask.shape) if hidden.any() else None
    rest = mask.detach().masked_fill(hidden, 0.0).to(dtype=like.dtype, device=like.device)
    return padding, rest[:, None, None, :] if rest.any() else None


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
