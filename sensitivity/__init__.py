"""How much every output time step of a temporal attention model depends on every input time step."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sensitivity.attention import SoftmaxAttention
    from sensitivity.diagnosis import diagnose
    from sensitivity.errors import InputError, RunError, SensitivityError, SensitivityWarning
    from sensitivity.measure import blocks, measure
    from sensitivity.result import SensitivityMap, SensitivityStatistics

__all__ = [
    "InputError",
    "RunError",
    "SensitivityError",
    "SensitivityMap",
    "SensitivityStatistics",
    "SensitivityWarning",
    "SoftmaxAttention",
    "blocks",
    "diagnose",
    "measure",
]
__version__ = "0.1.0"

_HOMES = {
    "InputError": "errors",
    "RunError": "errors",
    "SensitivityError": "errors",
    "SensitivityMap": "result",
    "SensitivityStatistics": "result",
    "SensitivityWarning": "errors",
    "SoftmaxAttention": "attention",
    "blocks": "measure",
    "diagnose": "diagnosis",
    "measure": "measure",
}
_ROOMS = (
    "adapters",
    "bounds",
    "checkpoint",
    "fit",
    "jacobian",
    "layers",
    "models",
    "plot",
    "statistics",
    "sweep",
    "traffic",
    "training",
)


class _Package(ModuleType):
    """The package itself: ``sensitivity.measure`` is the function also after its module of that name was imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "measure" and isinstance(value, ModuleType):
            value = value.measure
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Loads a name or a room when it is first used, so that the command line can speak before torch is there."""
    if name in _HOMES:
        value = getattr(importlib.import_module(f"sensitivity.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return importlib.import_module(f"sensitivity.{name}")
    raise AttributeError(f"module 'sensitivity' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
