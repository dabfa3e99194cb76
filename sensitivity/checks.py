"""Checks of what callers hand in, shared by every room so that the sentences are the same everywhere."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.errors import InputError, SensitivityError

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # what torch computes and differentiates in


def all_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite: one pass where their sum is, and a closer look where it is not."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def finite(tensor: Tensor, name: str, way: str = "remove or impute them before measuring") -> Tensor:
    """Returns ``tensor`` if all its entries are finite.

    Args:
        tensor: any floating tensor.
        name: what the message calls it.
        way: the way out.

    Raises:
        InputError: an entry is NaN or infinite; the message says how many and where the first one is. Or there are no
            entries, because the tensor is on the meta device.
    """
    held(tensor, name)
    if not all_finite(tensor):
        bad = ~torch.isfinite(tensor)
        index = tuple(int(part) for part in bad.nonzero()[0])
        kind = "NaN" if torch.isnan(tensor[index]) else "infinite"
        raise InputError(
            f"{name} must be finite, but {int(bad.sum())} of {tensor.numel()} entries are not (the first is {kind}, "
            f"at index {index}); {way}."
        )
    return tensor


def held(tensor: Tensor, name: str) -> None:
    """Refuses a tensor without numbers, such as the parameters of a model whose weights are not loaded yet.

    Raises:
        InputError: the tensor is on the meta device.
    """
    if tensor.is_meta:
        raise InputError(f"{name} is on the meta device, which holds no numbers; load it before measuring.")


def seed(value: Any, least: int = -(2**63)) -> None:
    """Refuses what no generator can be seeded with.

    Args:
        value: the seed.
        least: smallest one.

    Raises:
        InputError: not an integer of at most 64 bits, or below ``least``.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= int(value) < 2**63:
        which = "at least 0 and " if least == 0 else ""
        raise InputError(f"seed must be an integer of {which}at most 64 bits, not {value!r}.")


def floating(dtype: Any) -> None:
    """Refuses a type in which nothing can be computed and differentiated; None is let through.

    Raises:
        InputError: not a floating type of 16 to 64 bits.
    """
    if dtype is not None and dtype not in FLOATS:
        raise InputError(f"dtype must be a floating type such as torch.float64, not {dtype!r}.")


def device(place: Any) -> torch.device | None:
    """The device; None where none is given.

    Raises:
        InputError: no such device.
    """
    try:
        return None if place is None else torch.device(place)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{place!r} is neither a device, such as 'cpu' or 'cuda:0', nor a torch.dtype.") from error


def tokens(value: Any, dim: int | None = None) -> Float[Tensor, "sample time feature"]:
    """Brings tokens to ``(sample, time, feature)`` and checks them.

    A two-dimensional tensor is one sample; further leading axes (nodes, for instance) are folded into ``sample``.

    Args:
        value: floating tensor ``(..., time, feature)``.
        dim: the feature width that is expected, if there is one.

    Raises:
        InputError: not a floating tensor, fewer than two axes, empty, not finite, or of another width than ``dim``.
    """
    if not isinstance(value, Tensor):
        raise InputError(f"tokens must be a torch tensor (sample, time, feature), not {type(value).__name__}.")
    if value.is_nested or value.layout != torch.strided or value.is_meta:
        raise InputError(
            "tokens must be a dense tensor that holds numbers, not a sparse, nested or meta one; pad sequences of "
            "different lengths and say so with padding=."
        )
    if value.dtype not in FLOATS:
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise InputError(f"tokens must be floating point, not {value.dtype}; convert them to torch.float32.")
        raise InputError(
            f"tokens must be floating point, not {value.dtype}: integer ids have no derivative; name the embedding "
            "layer with layer= and measure from its output, or pass embedded tokens."
        )
    if value.ndim < 2:
        raise InputError(f"tokens must have the axes (sample, time, feature), not the shape {tuple(value.shape)}.")
    if value.numel() == 0:
        raise InputError(f"tokens are empty: shape {tuple(value.shape)}; every axis needs at least one entry.")
    if dim is not None:
        features(value, dim)
    finite(value, "tokens")
    return value.reshape(-1, *value.shape[-2:])


def features(tokens: Float[Tensor, "*axes feature"], dim: int) -> None:
    """Refuses tokens of another width than ``dim``.

    Raises:
        InputError: the widths differ.
    """
    if tokens.shape[-1] != dim:
        raise InputError(f"tokens have {tokens.shape[-1]} features, but the layer takes {dim}.")


def padding(value: Tensor | None, samples: int, length: int) -> Bool[Tensor, "sample time"] | None:
    """Brings a padding mask (True = padded, as in ``key_padding_mask``) to ``(sample, time)``.

    Raises:
        InputError: not boolean, of another shape than ``(sample, time)``, or a sample that is padding throughout.
    """
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        raise InputError("padding must be a boolean tensor (sample, time), True where a position is padding.")
    held(value, "padding")
    if value.shape[-1] != length or value.numel() not in (length, samples * length):
        raise InputError(f"padding has shape {tuple(value.shape)}, but the tokens are ({samples}, {length}) positions.")
    value = value.reshape(-1, length).expand(samples, length)
    if value.all(dim=-1).any():
        first = int(value.all(dim=-1).nonzero()[0, 0])
        raise InputError(f"sample {first} is padding throughout; drop it before measuring.")
    return value


def lengths(values: Any) -> list[int]:
    """Checks sequence lengths: integers of at least 1; returns them sorted, without repeats.

    Raises:
        InputError: none given, not an integer, or below 1.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"lengths must be several integers, such as [12, 24, 48, 96], not {values!r}.")
    values = list(values)
    if len(values) == 0:
        raise InputError("lengths are empty; give at least one sequence length, such as 12,24,48,96.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"lengths must be integers, not {value!r}.")
        if value < 1:
            raise InputError(f"lengths must be at least 1, not {value}.")
    return sorted(set(values))


def head_width(dim: int, heads: int) -> int:
    """Width of one head.

    Raises:
        InputError: ``dim`` is not a positive multiple of ``heads``, or one of them is not an integer.
    """
    for name, value in (("dim", dim), ("heads", heads)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InputError(f"{name} must be an integer, not {value!r}.")
    if heads < 1 or dim < 1 or dim % heads:
        nearest = f"; nearest that fit: {dim - dim % heads} and {dim - dim % heads + heads}" if 1 <= heads < dim else ""
        raise InputError(f"dim={dim} is not divisible by heads={heads}{nearest}.")
    return dim // heads


def shortened(text: str) -> str:
    """A foreign message on one line, cut where it gets long."""
    text = " ".join(text.split())
    return text if len(text) <= 170 else f"{text[:167]}..."


@contextlib.contextmanager
def running(name: str, inputs: Any) -> Iterator[None]:
    """Around the first call of a foreign model: whatever it raises becomes one sentence, with the original as cause.

    Args:
        name: what the message calls the model.
        inputs: what the model is called with.

    Raises:
        InputError: the model does not run on these inputs.
    """
    try:
        yield
    except (SensitivityError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        shown = f"inputs of shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
        said = shortened(f"{type(error).__name__}: {error}")
        raise InputError(
            f"{name} does not run on {shown} ({said}); hand in what model(tokens) takes, or wrap the model in a "
            "function of the tokens alone."
        ) from error
