"""Any submodule of a model as a function of the tokens that reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sensitivity.adapters.capture import Call, Forward, capture_input, reaching
from sensitivity.adapters.outputs import Select, select_output, time_first
from sensitivity.errors import InputError
from sensitivity.modules import unwrap


def submodule_function(
    model: nn.Module, tokens: Any, name: str, *, forward: Forward | None = None, select: Select | None = None
) -> tuple[Callable[[Tensor], Tensor], Float[Tensor, "sample time feature"]]:
    """The submodule ``name`` as a function on ``(sample, time, feature)``, and the tokens that reach it.

    Inside torch's modules that were built with ``batch_first=False``, axes are turned to ``(sample, time, feature)``.
    All other arguments of the call (masks, offsets) stay as the model gave them. Arguments that are the tokens
    themselves, such as keys and values in self-attention, follow the tokens.

    Args:
        model: the model; it is run once.
        tokens: what the model is called with.
        name: the submodule; ``name@1`` is its second call.
        forward: how the model is called, ``forward(model, tokens)``.
        select: which part of the submodule's output is meant.

    Raises:
        InputError: an unknown name, a submodule that did not run once, or that takes no floating tokens.
    """
    call = capture_input(model, tokens, name, forward)
    module = dict(unwrap(model).named_modules(remove_duplicate=False))[name.partition("@")[0]]
    given = _tokens_of(name, call)
    turned = given.ndim == 3 and _turned(unwrap(model), name.partition("@")[0])
    arranged = given.transpose(0, 1) if turned else given
    folded = reaching(arranged, name)

    def run(value: Tensor) -> Tensor:
        value = value.transpose(0, 1) if turned else value

        def put(argument: Any) -> Any:
            return value if argument is given else argument

        output = module(*map(put, call.args), **{key: put(argument) for key, argument in call.kwargs.items()})
        output = select_output(output, select)
        return output.transpose(0, 1) if turned else output

    if given.ndim <= 3:
        return (run if given.ndim == 3 else lambda value: run(value[0])[None]), folded
    return _folding(run, arranged, folded), folded


def _turned(model: nn.Module, name: str) -> bool:
    """Whether tokens are ``(time, sample, feature)`` there: the innermost module around that knows says so."""
    modules = dict(model.named_modules(remove_duplicate=False))
    path = name.split(".") if name else []
    around = [".".join(path[:count]) for count in range(len(path), -1, -1)]
    orders = (time_first(modules[place]) for place in around)
    return bool(next((order for order in orders if order is not None), False))


def embedding_function(
    model: nn.Module, ids: Tensor, name: str, *, forward: Forward | None = None, select: Select | None = None
) -> tuple[Callable[[Tensor], Tensor], Float[Tensor, "sample time feature"]]:
    """The whole model as a function of what its embedding layer ``name`` puts out for ``ids``, and that output.

    Integer ids have no derivative; their embeddings have. The ids themselves stay as they are wherever else the model
    reads them, so the function takes the true batch only.

    Args:
        model: the model; it is run once.
        ids: what the model is called with.
        name: its embedding layer, which must run exactly once.
        forward: how the model is called, ``forward(model, ids)``, this once; ``model(ids)`` unless given.
        select: which part of the model's output is meant.

    Raises:
        InputError: the layer did not run exactly once, or its output is not ``(sample, time, feature)``.
    """
    model = unwrap(model)
    layer, caught = model.get_submodule(name), list[Tensor]()
    handle = layer.register_forward_hook(lambda _module, _inputs, output: caught.append(output.detach().clone()))
    try:
        with torch.no_grad():
            model(ids) if forward is None else forward(model, ids)
    finally:
        handle.remove()
    if len(caught) != 1 or caught[0].ndim != 3:
        shapes = ", ".join(str(tuple(value.shape)) for value in caught) or "nothing"
        raise InputError(
            f"the embedding layer {name!r} must run once and put out (sample, time, feature), but it put out {shapes}."
        )
    expected = caught[0].shape

    def function(values: Tensor) -> Tensor:
        if values.shape != expected:
            raise RuntimeError("an embedding's output is measured over its own batch only")
        swap = layer.register_forward_hook(lambda _module, _inputs, _output: values)
        try:
            return select_output(model(ids), select)
        finally:
            swap.remove()

    return function, caught[0]


def _tokens_of(name: str, call: Call) -> Tensor:
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value
    raise InputError(f"layer {name!r} takes no floating tokens (sample, time, feature), so it has no Jacobian.")


def _folding(run: Callable[[Tensor], Tensor], given: Tensor, folded: Tensor) -> Callable[[Tensor], Tensor]:
    """Tokens with more leading axes: folded where that gives the same, else brought back to them each time."""
    lead = given.shape[1:-2]

    def unfolded(value: Tensor) -> Tensor:
        output = run(value.reshape(-1, *lead, *value.shape[-2:]))
        return output.reshape(-1, *output.shape[-2:])

    with torch.no_grad():
        expected = unfolded(folded)
        try:
            same = torch.allclose(run(folded), expected, rtol=1e-4, atol=1e-6)
        except Exception:  # whatever a module of another shape makes of folded tokens
            same = False
    return run if same else unfolded
