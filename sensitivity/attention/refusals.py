"""What the description of an attention layer refuses, each in one sentence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sensitivity import checks, diagonal_bias
from sensitivity.errors import InputError

if TYPE_CHECKING:
    from sensitivity.attention.layer import SoftmaxAttention


def check(layer: SoftmaxAttention, tensors: dict[str, Tensor]) -> None:
    """Refuses weights, masks and numbers that no layer can have.

    Args:
        layer: the description.
        tensors: all of its tensors, by the name of the field.

    Raises:
        InputError: weights or biases that do not fit together, that are not floating point or not finite; a mask of
            another type or with more axes than there are; a factor that is not a finite number.
    """
    _check_weights(layer)
    for name, value in tensors.items():
        if name != "padding":
            _check_type(name, value)
        if name not in ("bias", "padding"):
            checks.finite(value, f"the attention layer's {name}")
    _check_biases(layer)
    _check_masks(layer)
    if not _is_finite(layer.residual):
        raise InputError(f"residual must be True, False or a finite factor, not {layer.residual!r}.")
    if layer.residual and layer.out_dim != layer.dim:
        raise InputError(f"a residual needs equal widths in and out, not {layer.dim} and {layer.out_dim}.")
    if layer.scale is not None and not _is_finite(layer.scale):
        raise InputError(f"scale must be a finite number, not {layer.scale!r}; leave it out for 1 / sqrt(width).")
    diagonal_bias.check(layer.diagonal_bias, layer.diagonal_length, layer.heads)


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except TypeError:
        return False


def check_samples(layer: SoftmaxAttention, samples: int) -> None:
    """Refuses masks and factors of another number of samples than there are.

    Raises:
        InputError: ``bias``, ``multiplier`` or ``padding`` are given sample by sample, for more or fewer samples.
    """
    for name in ("bias", "multiplier", "padding"):
        value = getattr(layer, name)
        if value is not None and value.shape[0] not in (1, samples):
            raise InputError(
                f"the attention layer's {name} is for {value.shape[0]} samples, but the tokens hold {samples}; give "
                "one for each sample, or one for all."
            )


def _check_weights(layer: SoftmaxAttention) -> None:
    query, key, value, output = (
        tuple(weight.shape)
        for weight in (layer.query_weight, layer.key_weight, layer.value_weight, layer.output_weight)
    )
    if key[:2] != query[:2] or value[0] != query[0]:
        raise InputError(
            f"query, key and value weights disagree: {query}, {key}, {value}; expected (head, width, dim) each."
        )
    if output[0] != query[0] or output[2] != value[1]:
        raise InputError(
            f"the output weight {output} does not fit the value weight {value}; expected (head, out, value_width)."
        )


def _check_type(name: str, value: Tensor) -> None:
    if value.dtype in checks.FLOATS:
        return
    if name == "bias" and value.dtype == torch.bool:
        raise InputError(
            "the attention layer's bias is boolean, but it is added to the logits; give 0 where a pair is seen and "
            "-inf where it is hidden, such as torch.zeros(mask.shape).masked_fill(mask, -torch.inf)."
        )
    raise InputError(
        f"the attention layer's {name} must be floating point, not {value.dtype}; convert it with .to(torch.float32)."
    )


def _check_biases(layer: SoftmaxAttention) -> None:
    shapes = {
        "query_bias": (layer.heads, layer.width),
        "key_bias": (layer.heads, layer.width),
        "value_bias": (layer.heads, layer.value_weight.shape[1]),
        "output_bias": (layer.out_dim,),
    }
    for name, shape in shapes.items():
        value = getattr(layer, name)
        if value is not None and tuple(value.shape) != shape:
            raise InputError(f"the attention layer's {name} has shape {tuple(value.shape)}, but needs {shape}.")


def _check_masks(layer: SoftmaxAttention) -> None:
    if layer.bias is not None and not (layer.bias < math.inf).all():
        raise InputError("the attention layer's bias holds NaN or +inf; use -inf to hide a pair.")
    for name in ("bias", "multiplier"):
        value = getattr(layer, name)
        if value is not None and (value.ndim > 4 or (value.ndim > 2 and value.shape[-3] not in (1, layer.heads))):
            raise InputError(
                f"the attention layer's {name} has shape {tuple(value.shape)}, which does not broadcast to (sample, "
                f"{layer.heads} heads, query, key)."
            )
    padding = layer.padding
    if padding is not None and (padding.dtype != torch.bool or padding.ndim != 2):
        raise InputError(
            "the attention layer's padding must be boolean (sample, time), True at padded positions, not "
            f"{padding.dtype} of shape {tuple(padding.shape)}."
        )
