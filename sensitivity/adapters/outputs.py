"""The part of a model's output that is meant: one tensor ``(sample, time, feature)``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from sensitivity.errors import InputError
from sensitivity.modules import unwrap

Select = str | int | Callable[[Any], Tensor]
FIELDS = ("last_hidden_state", "logits", "prediction", "predictions", "forecast", "output", "outputs", "out")


def as_sequence_function(model: Callable[..., Any], select: Select | None = None) -> Callable[[Tensor], Tensor]:
    """The model as a function from tokens to one tensor, both ``(sample, time, feature)``.

    Wrappers are taken off. A ``torch.nn.MultiheadAttention`` attends to its own tokens; it, a recurrent layer, or a
    transformer encoder that was built with ``batch_first=False`` gets its axes in its own order.

    Args:
        model: a module or callable whose output may be a tensor, tuple, list, dict or dataclass, with None among its
            parts.
        select: key, index, attribute, or a callable that picks the tensor; see :func:`select_output` for what is picked
            without it.
    """
    model = unwrap(model)
    called = _self_attention(model) if isinstance(model, nn.MultiheadAttention) else model
    turned = isinstance(model, nn.Module) and bool(time_first(model))

    def function(tokens: Tensor) -> Tensor:
        output = select_output(called(tokens.transpose(0, 1) if turned else tokens), select)
        return output.transpose(0, 1) if turned else output

    return function


def select_output(output: Any, select: Select | None = None) -> Tensor:
    """Picks one tensor of a model's output.

    Without ``select``: the tensor itself; the first tensor of a tuple or list (the first with three axes, if there is
    one); the one well-known field of a dict or dataclass (``last_hidden_state``, ``logits``, ...), or its only tensor.

    Raises:
        InputError: no tensor, several candidates, or a ``select`` that picks none; the message lists the choices.
    """
    if select is not None:
        return _selected(output, select)
    if isinstance(output, Tensor):
        return output
    parts = _parts(output)
    tensors = {key: value for key, value in parts.items() if isinstance(value, Tensor) and value.is_floating_point()}
    if isinstance(output, (tuple, list)) and not hasattr(output, "_fields"):
        return _first(output, parts)
    known = [key for key in FIELDS if key in tensors]
    deep = {key: value for key, value in tensors.items() if value.ndim == 3}
    for keys in (known, list(deep), list(tensors)):
        if len(keys) == 1:
            return tensors[keys[0]]
        if len(keys) > 1:
            break
    if not tensors:
        raise InputError(f"the output, {_kind(output)}, holds no floating tensor; {_choices(parts)}.")
    raise InputError(
        f"the output, {_kind(output)}, holds several tensors; pass select= with one of {_choices(tensors)}."
    )


def _first(output: Any, parts: dict[Any, Any]) -> Tensor:
    leaves = list(_leaves(output))
    for value in (*(leaf for leaf in leaves if leaf.ndim == 3), *leaves):
        return value
    raise InputError(f"the output, {_kind(output)}, holds no floating tensor; {_choices(parts)}.")


def _leaves(output: Any) -> Iterator[Tensor]:
    """Floating tensors in the order of nested tuples and lists; of anything else, the one that is meant."""
    for value in output:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, (tuple, list)):
            yield from _leaves(value)
        elif _parts(value):
            yield select_output(value)


def _selected(output: Any, select: Select) -> Tensor:
    if callable(select):
        picked = select(output)
    else:
        parts = _parts(output)
        if isinstance(select, int) and not isinstance(output, Mapping):
            keys = list(parts)
            select = keys[select] if -len(keys) <= select < len(keys) else select
        if select not in parts:
            raise InputError(f"select={select!r} is not a part of the output, {_kind(output)}; {_choices(parts)}.")
        picked = parts[select]
    if not isinstance(picked, Tensor):
        raise InputError(f"select={select!r} picks {type(picked).__name__} from the output, not a tensor.")
    return picked


def _parts(output: Any) -> dict[Any, Any]:
    """The parts of an output by key, attribute or index."""
    if isinstance(output, Mapping):
        return dict(output)
    if hasattr(output, "_fields"):
        return dict(zip(output._fields, output, strict=True))
    if isinstance(output, (tuple, list)):
        return dict(enumerate(output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {part.name: getattr(output, part.name) for part in dataclasses.fields(output)}
    return dict(vars(output)) if hasattr(output, "__dict__") else {}


def _choices(parts: Mapping[Any, Any]) -> str:
    shown = [
        f"{key!r} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{key!r} ({type(value).__name__})"
        for key, value in parts.items()
    ]
    return ", ".join(shown) if shown else "it has no parts"


def _kind(output: Any) -> str:
    name = type(output).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _self_attention(module: nn.MultiheadAttention) -> Callable[[Tensor], Tensor]:
    def attend(tokens: Tensor) -> Tensor:
        return module(tokens, tokens, tokens, need_weights=False)[0]

    return attend


def time_first(module: nn.Module) -> bool | None:
    """Whether a module of torch was built with ``batch_first=False``; None if it knows no such order."""
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return not module.batch_first
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
        return time_first(module.layers[0])
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return not module.self_attn.batch_first
    return None
