"""Training: one front door (:func:`fit`), the Lightning module, the loader, masked metrics, and the folder of a run.

Lightning is imported only when a training starts, or with :class:`SensitivityCallback`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sensitivity.training.loop import Interrupted
from sensitivity.training.run import Result, fit
from sensitivity.training.settings import Settings

if TYPE_CHECKING:
    from sensitivity.training.diagnostics import SensitivityCallback

__all__ = ["Interrupted", "Result", "SensitivityCallback", "Settings", "fit"]


def __getattr__(name: str) -> Any:
    """Loads the callback, and Lightning with it, when it is first asked for."""
    if name == "SensitivityCallback":
        return importlib.import_module("sensitivity.training.diagnostics").SensitivityCallback
    raise AttributeError(f"module 'sensitivity.training' has no attribute {name!r}")
