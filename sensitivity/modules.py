"""Finding the modules behind what a caller hands in: wrappers taken off, closures looked into."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrap(model: Any) -> Any:
    """Takes off ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``, however they are nested.

    Args:
        model: a module or a callable; anything that is not wrapped comes back as it is.
    """
    while True:
        if isinstance(model, _WRAPPERS):
            model = model.module
        elif isinstance(model, nn.Module) and "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]
        elif hasattr(model, "_torchdynamo_orig_callable") and not isinstance(model, nn.Module):
            model = model._torchdynamo_orig_callable
        else:
            return model


def modules_of(function: Callable[..., Any] | nn.Module | None) -> list[nn.Module]:
    """The outermost modules that a callable can reach: itself, its owner, its closure, its arguments, its globals.

    Args:
        function: a module, a bound method, a ``functools.partial``, or a function that uses modules by name.
    """
    found: list[nn.Module] = []
    for module in _reach(function, depth=4, seen=set()):
        if not any(module is other for other in found):
            found.append(module)
    if len(found) < 2:
        return found
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inner]


def _reach(value: Any, depth: int, seen: set[int]) -> Iterator[nn.Module]:
    value = unwrap(value)
    if depth < 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield value
        return
    for part in _parts(value):
        yield from _reach(part, depth - 1, seen)


def _parts(value: Any) -> Iterator[Any]:
    """What a callable or a small container refers to."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (list, tuple)):
        yield from value[:64]
    elif isinstance(value, dict):
        yield from list(value.values())[:64]
    elif hasattr(value, "__func__"):
        yield from (value.__self__, value.__func__)
    elif isinstance(getattr(value, "__code__", None), types.CodeType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _filled(cell))
        yield from (value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__)
        yield from value.__defaults__ or ()
    elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type):
        yield from vars(value).values()


def _names(code: types.CodeType) -> set[str]:
    """Names that the code uses, in comprehensions and inner functions too."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*(_names(part) for part in inner))


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading is the test
    except ValueError:
        return False
    return True
