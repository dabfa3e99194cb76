"""Attention and sensitivity of several models side by side, in colours that mean the same in every column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize

from sensitivity.errors import InputError
from sensitivity.plot import style
from sensitivity.plot.attention import attention
from sensitivity.plot.heatmap import DECADES, heatmap
from sensitivity.result import SensitivityMap
from sensitivity.statistics import mean_map

Limits = tuple[float, float]


def variants(maps: Mapping[str, SensitivityMap], *, title: str | None = None, width: float = 2.5) -> np.ndarray:
    """Draws attention weights (above) and sensitivities (below) of one layer, a column for every variant.

    Each row has one scale and one colour bar, so that columns can be compared by eye: linear for the weights (mean over
    heads and samples), logarithmic for the sensitivities.

    Args:
        maps: by the name of the variant, with attention weights, all of one norm.
        title: of the figure.
        width: of a column, in inches.

    Returns:
        The Axes, ``(row, variant)``.

    Raises:
        InputError: no map, maps of different norms, or a map without attention weights.
    """
    if not maps:
        raise InputError("there is no map to draw; give at least one variant.")
    norms = sorted({one.norm for one in maps.values()})
    if len(norms) > 1:
        raise InputError(f"the maps are of different norms ({', '.join(norms)}); measure all variants with one.")
    axes = style.grid(2, len(maps), width=width, height=width + 0.35)
    weights, values = _weight_limits(maps), _norm_limits(maps)
    for column, (name, one) in enumerate(maps.items()):
        attention(one, ax=axes[0, column], title=name, limits=weights, bar=False)
        heatmap(one, ax=axes[1, column], title="", limits=values, bar=False)
        axes[0, column].set_xlabel("")
        if column:
            axes[0, column].set_ylabel("")
            axes[1, column].set_ylabel("")
    _bar(axes[0], Normalize(*weights), "attention weight")
    _bar(axes[1], LogNorm(*values), style.NORM_LABELS[norms[0]])
    if title:
        axes[0, 0].figure.suptitle(title)
    return axes


def _weight_limits(maps: Mapping[str, SensitivityMap]) -> Limits:
    """From zero to the largest mean weight of all variants."""
    largest = 0.0
    for name, one in maps.items():
        if one.attention is None:
            raise InputError(f"the map of {name!r} holds no attention weights; measure an attention layer.")
        mask = one.attended_pairs().expand(one.attention.shape).flatten(0, 1)
        largest = max(largest, float(mean_map(one.attention.flatten(0, 1).double(), mask).max()))
    return 0.0, largest or 1.0


def _norm_limits(maps: Mapping[str, SensitivityMap]) -> Limits:
    """From the smallest to the largest positive mean sensitivity of all variants, over six decades at most."""
    means = [mean_map(one.norms.double(), one.visible) for one in maps.values()]
    positive = np.concatenate([mean[mean > 0].numpy().ravel() for mean in means])
    if not len(positive):
        return 0.1, 1.0
    low, high = float(positive.min()), float(positive.max())
    low = max(low, high * 10.0**-DECADES)
    return (low, high) if low < high else (low * 0.8, high * 1.25)


def _bar(row: np.ndarray, norm: Normalize, label: str) -> None:
    scale: Any = ScalarMappable(norm, matplotlib.colormaps[style.COLOUR_MAP])
    bar = row[0].figure.colorbar(scale, ax=list(row), label=label, shrink=0.85, aspect=15, pad=0.02)
    if isinstance(norm, LogNorm):
        style.log_ticks(bar.ax.yaxis, float(norm.vmin or 0.1), float(norm.vmax or 1.0))
