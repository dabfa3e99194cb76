"""Every attention layer of a model, measured at every sequence length: how fast sensitivity decays, and why.

>>> from sensitivity import SoftmaxAttention
>>> found = sweep(RandomTokens(SoftmaxAttention.random(dim=8, heads=2), samples=4), [4, 8, 16, 32])
>>> found.layers, found.lengths
(('attention',), (4, 8, 16, 32))
>>> bool(0.5 < found.decay("attention", "off_diagonal").exponent < 1.5)
True
"""

from sensitivity.sweep.bounds import DEFAULT as BOUNDS
from sensitivity.sweep.bounds import Verdict
from sensitivity.sweep.record import Record
from sensitivity.sweep.result import Sweep
from sensitivity.sweep.runner import fingerprint, sweep
from sensitivity.sweep.source import Batch, ModelLayers, RandomTokens, Sequences

__all__ = [
    "BOUNDS",
    "Batch",
    "ModelLayers",
    "RandomTokens",
    "Record",
    "Sequences",
    "Sweep",
    "Verdict",
    "fingerprint",
    "sweep",
]
