"""Figures: one file each; every function takes ``ax=None`` and returns the Axes.

No figure is registered with pyplot, so nothing needs a display and nothing has to be closed.
"""

from sensitivity.plot.attention import attention, diagonal_mass
from sensitivity.plot.decay import decay
from sensitivity.plot.heatmap import heatmap
from sensitivity.plot.paths import path_shares
from sensitivity.plot.profiles import lag_profile, primacy_profile
from sensitivity.plot.style import grid, save
from sensitivity.plot.variants import variants

__all__ = [
    "attention",
    "decay",
    "diagonal_mass",
    "grid",
    "heatmap",
    "lag_profile",
    "path_shares",
    "primacy_profile",
    "save",
    "variants",
]
