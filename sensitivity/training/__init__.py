"""Training: one front door (:func:`fit`), the Lightning module, the loader, masked metrics, and the folder of a run.

Lightning is imported only when a training starts.
"""

from sensitivity.training.loop import Interrupted
from sensitivity.training.run import Result, fit
from sensitivity.training.settings import Settings

__all__ = ["Interrupted", "Result", "Settings", "fit"]
