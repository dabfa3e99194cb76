"""Checkpoints: one plain file that is safe to load, and careful loading of everybody else's.

>>> import tempfile, pathlib
>>> from sensitivity.models import Forecaster
>>> path = pathlib.Path(tempfile.mkdtemp()) / "ckpt.pt"
>>> save(path, Forecaster(nodes=3, dim=8, depth=1, heads=2), metrics={"mae": 3.1})
>>> load(path).metrics
{'mae': 3.1}
"""

from sensitivity.checkpoint.loading import Checkpoint, load
from sensitivity.checkpoint.saving import FORMAT, VERSION, save

__all__ = ["FORMAT", "VERSION", "Checkpoint", "load", "save"]
