"""What reaches the attention layers of a model when it runs: tokens and masks, from one forward pass."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sensitivity import checks
from sensitivity.attention import SoftmaxAttention
from sensitivity.describers import describer
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.modules import unwrap

Forward = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Captured:
    """One attention layer as it was called.

    Attributes:
        name: the layer's name in the model; ``name@0``, ``name@1``, ... where the model called it several times.
        attention: its description, with the masks of the call.
        tokens: what it was called with, ``(sample, time, feature)``; other leading axes are folded into ``sample``.
        module: the layer itself.
        shape: the shape of the tokens before that.
    """

    name: str
    attention: SoftmaxAttention
    tokens: Float[Tensor, "sample time feature"]
    module: nn.Module
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """Positional and named arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules inside ``model`` that can be described as softmax attention, by name, in the order of the model."""
    model = unwrap(model)
    return {name: part for name, part in model.named_modules() if describer(part) is not None}


def capture(
    model: nn.Module, tokens: Any, layers: list[str] | tuple[str, ...] | None = None, forward: Forward | None = None
) -> dict[str, Captured]:
    """Runs the model once and catches what its attention layers were called with.

    The fused paths of torch's transformer layers, which skip hooks, are off while the model runs. The model itself is
    not guarded here (see :func:`sensitivity.jacobian.guard.measuring`).

    Args:
        model: the model; ``torch.compile`` and data-parallel wrappers are taken off.
        tokens: what the model is called with.
        layers: names of attention layers; None takes all that run.
        forward: how the model is called, ``forward(model, tokens)``; ``model(tokens)`` unless given. It must run every
            wanted layer exactly once, or its calls are told apart as ``name@0``, ``name@1``, ...

    Raises:
        InputError: an unknown name; a layer that did not run, or that attends to other tokens than its own; masks that
            the layer's adapter cannot describe.
    """
    model = unwrap(model)
    wanted = _wanted(model, layers)
    calls = _record(model, tokens, wanted, forward)
    if layers is None:
        calls = _those_that_ran(calls)
    captured: dict[str, Captured] = {}
    for name, found in calls.items():
        _check_ran(name, found)
        for index, call in enumerate(found):
            label = name if len(found) == 1 else f"{name}@{index}"
            captured[label] = _describe(label, wanted[name], call)
    return captured


def capture_input(model: nn.Module, tokens: Any, name: str, forward: Forward | None = None) -> Call:
    """The arguments with which the model calls its submodule ``name`` (any module, not only attention).

    Args:
        model: the model.
        tokens: what the model is called with.
        name: the submodule; ``name@1`` is its second call, counted from 0.
        forward: how the model is called, as in :func:`capture`.

    Raises:
        InputError: an unknown name, a submodule that did not run, or that ran several times.
    """
    model = unwrap(model)
    plain, _, number = name.partition("@")
    modules = dict(model.named_modules(remove_duplicate=False))
    if plain not in modules or (number and not number.isdigit()):
        raise InputError(f"unknown layer {name!r}; known: {_listed([key for key in modules if key]) or 'none'}.")
    found = _record(model, tokens, {plain: modules[plain]}, forward)[plain]
    _check_ran(plain, found)
    if not number and len(found) > 1:
        raise InputError(
            f"layer {plain!r} ran {len(found)} times in one pass of the model; say which call is meant: "
            f"{plain}@0 to {plain}@{len(found) - 1}."
        )
    if number and int(number) >= len(found):
        raise InputError(f"layer {plain!r} ran {len(found)} times, so {name!r} does not exist.")
    return found[int(number or 0)]


def _wanted(model: nn.Module, layers: list[str] | tuple[str, ...] | None) -> dict[str, nn.Module]:
    known = attention_layers(model)
    if layers is None:
        if not known:
            raise InputError(
                f"{type(model).__name__} has no attention layer that can be described; measure it with "
                "backend='autodiff', or give its attention class a softmax_attention() method."
            )
        return known
    everything = dict(model.named_modules(remove_duplicate=False))
    for name in layers:
        if name not in everything or describer(everything[name]) is None:
            listed = _listed(list(known)) or "none"
            kind = (
                f"{type(everything[name]).__name__} is not an attention layer"
                if name in everything
                else "unknown layer"
            )
            raise InputError(f"{kind}: {name!r}; known attention layers: {listed}.")
    return {name: everything[name] for name in layers}


def _record(
    model: nn.Module, tokens: Any, wanted: dict[str, nn.Module], forward: Forward | None
) -> dict[str, list[Call]]:
    """Runs the model once with a hook on every wanted module."""
    calls: dict[str, list[Call]] = {name: [] for name in wanted}

    def hook(name: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[name].append(_copied(args, kwargs))

        return keep

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_slow_path())
        for name, module in wanted.items():
            handle = module.register_forward_pre_hook(hook(name), with_kwargs=True)
            stack.callback(handle.remove)
        model(tokens) if forward is None else forward(model, tokens)
    return calls


@contextlib.contextmanager
def _slow_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Copies of the tensors, once per tensor, so that later changes in place do not reach them."""
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copies.setdefault(id(value), value.detach().clone())
        return value

    return Call(tuple(copy(value) for value in args), {name: copy(value) for name, value in kwargs.items()})


def _check_ran(name: str, found: list[Call]) -> None:
    if not found:
        raise InputError(
            f"layer {name!r} did not run when the model ran: it is unused, or its weights are used without calling it; "
            "choose another layer, or pass forward= with a call that runs it."
        )


def _those_that_ran(calls: dict[str, list[Call]]) -> dict[str, list[Call]]:
    silent = [name for name, found in calls.items() if not found]
    if len(silent) == len(calls):
        raise InputError(
            f"none of the model's attention layers ({_listed(silent)}) ran as a module, so their tokens are not known; "
            "call the layers instead of using their weights, or measure with backend='autodiff'."
        )
    if silent:
        warnings.warn(
            f"left out, because they did not run when the model ran: {_listed(silent)}.",
            SensitivityWarning,
            stacklevel=3,
        )
    return {name: found for name, found in calls.items() if found}


def _describe(name: str, module: nn.Module, call: Call) -> Captured:
    describe = describer(module) or SoftmaxAttention.from_module
    arguments = inspect.signature(module.forward).bind(*call.args, **call.kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    if isinstance(module, nn.MultiheadAttention):
        tokens, options = _multihead(name, module, arguments)
    else:
        tokens, options = _own(name, module, arguments)
    shape = tuple(tokens.shape)
    return Captured(name, describe(module, **options), reaching(tokens, name), module, shape)


def reaching(tokens: Tensor, name: str) -> Float[Tensor, "sample time feature"]:
    """Brings the tokens with which layer ``name`` was called to ``(sample, time, feature)`` and checks them.

    Raises:
        InputError: not finite, empty, or without the three axes.
    """
    if name:
        way = "look at the layers before it, and for a row whose every key is hidden: torch before 2.5 makes it NaN"
        checks.finite(tokens, f"the tokens that reach {name!r}", way)
    return checks.tokens(tokens)


def _multihead(name: str, module: nn.MultiheadAttention, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    query = arguments["query"]
    if arguments["key"] is not query or arguments["value"] is not query:
        same = query.shape == arguments["key"].shape == arguments["value"].shape
        if not (same and torch.equal(query, arguments["key"]) and torch.equal(query, arguments["value"])):
            raise InputError(
                f"layer {name!r} was called with keys or values that are not its queries (cross-attention), so one set "
                "of tokens does not describe it; measure the model end to end with backend='autodiff'."
            )
    tokens = query if module.batch_first or query.ndim == 2 else query.transpose(0, 1)
    options = {key: arguments[key] for key in ("attn_mask", "key_padding_mask") if arguments.get(key) is not None}
    if arguments.get("is_causal") and "attn_mask" not in options:
        options["is_causal"] = True
    return tokens, options


def _own(name: str, module: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Tokens and options of a layer that describes itself: what both its forward and its description take by name."""
    describe = getattr(module, "softmax_attention", None)
    accepted = inspect.signature(describe).parameters if callable(describe) else {}
    tensors = [value for value in arguments.values() if isinstance(value, Tensor) and value.is_floating_point()]
    if not tensors:
        raise InputError(f"layer {name!r} was called without floating tokens, so it cannot be described.")
    options = {key: value for key, value in arguments.items() if key in accepted and value is not None}
    return tensors[0], options


def _listed(names: list[str]) -> str:
    return ", ".join(names[:40]) + (f", ... ({len(names)} in all)" if len(names) > 40 else "")
