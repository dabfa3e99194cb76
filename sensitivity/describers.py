"""Which modules can be described as softmax attention, and by what."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

Describe = Callable[..., Any]
_DESCRIBERS: dict[type[nn.Module], Describe] = {}


def register(kind: type[nn.Module]) -> Callable[[Describe], Describe]:
    """Registers how modules of class ``kind`` are described; used by ``sensitivity.adapters``, one call per class."""

    def add(describe: Describe) -> Describe:
        _DESCRIBERS[kind] = describe
        return describe

    return add


def describer(module: nn.Module) -> Describe | None:
    """How ``module`` is described: its own ``softmax_attention`` method, or a registered adapter; None if unknown."""
    own = getattr(module, "softmax_attention", None)
    if callable(own):
        return lambda _, **options: own(**options)
    _load_adapters()
    return next((_DESCRIBERS[kind] for kind in type(module).__mro__ if kind in _DESCRIBERS), None)


def _load_adapters() -> None:
    """Lets the adapters register themselves, on first use: this room imports nothing above it."""
    importlib.import_module("sensitivity.adapters")


def known_kinds() -> list[str]:
    """Names of the module classes that have an adapter."""
    return sorted(kind.__name__ for kind in _DESCRIBERS)
