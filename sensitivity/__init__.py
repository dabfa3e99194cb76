"""How much every output time step of a temporal attention model depends on every input time step."""

from __future__ import annotations

import importlib
from typing import Any

from sensitivity import adapters as _adapters  # registers the layers that can be described
from sensitivity.attention import SoftmaxAttention
from sensitivity.errors import InputError, RunError, SensitivityError, SensitivityWarning
from sensitivity.measure import blocks, measure
from sensitivity.result import SensitivityMap

__all__ = [
    "InputError",
    "RunError",
    "SensitivityError",
    "SensitivityMap",
    "SensitivityWarning",
    "SoftmaxAttention",
    "blocks",
    "measure",
]
__version__ = "0.1.0"

_ROOMS = ("bounds", "checkpoint", "fit", "layers", "models", "plot", "statistics", "sweep", "traffic", "training")


def __getattr__(name: str) -> Any:
    """Loads a room when it is first used, so that importing the package costs little more than importing torch."""
    if name in _ROOMS:
        return importlib.import_module(f"sensitivity.{name}")
    raise AttributeError(f"module 'sensitivity' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
