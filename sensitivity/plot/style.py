"""What all figures share: colours, labels, axes without pyplot, and files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import seaborn
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from sensitivity import files
from sensitivity.errors import InputError

_PALETTE = seaborn.color_palette("colorblind").as_hex()
BLUE, ORANGE, GREEN, RED, PURPLE, BROWN, PINK, GREY, YELLOW, SKY = _PALETTE
PATH_COLOURS = {"residual": GREY, "value": BLUE, "key": ORANGE, "query": GREEN}
DIAGONAL, OFF_DIAGONAL, REMOVED = RED, BLUE, PURPLE
BOUND_COLOURS = (GREEN, ORANGE, PURPLE, BROWN, SKY, PINK)
MASKED, ZERO = "#d4d4d4", "#ffffff"
COLOUR_MAP = "viridis"  # neither the grey of masked cells nor the white of zeros occurs in it

QUERY, KEY, LAG = "query time $i$ (step)", "key time $j$ (step)", "lag $i - j$ (steps)"
LENGTH = "sequence length $T$ (steps)"
NORM_LABELS = {
    "frobenius": "sensitivity (Frobenius norm)",
    "rms": "sensitivity (root-mean-square gain)",
    "spectral": "sensitivity (spectral norm)",
}
SUFFIXES = (".png", ".svg", ".pdf")


def grid(rows: int = 1, columns: int = 1, width: float = 6.0, height: float = 4.5) -> np.ndarray:
    """New Axes on a figure of their own, ``(rows, columns)``; the figure is ``axes[0, 0].figure``.

    Args:
        rows: rows of Axes.
        columns: columns of Axes.
        width: of one Axes, in inches.
        height: of one Axes, in inches.
    """
    with matplotlib.rc_context(seaborn.axes_style("ticks")):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        FigureCanvasAgg(figure)
        return figure.subplots(rows, columns, squeeze=False)


def axes(ax: Axes | None, width: float = 6.0, height: float = 4.5) -> Axes:
    """``ax``, or new Axes on a figure of their own."""
    return grid(width=width, height=height)[0, 0] if ax is None else ax


def save(figure: Figure | Axes, path: str | os.PathLike[str], dpi: int = 150) -> None:
    """Writes a figure (or the figure of these Axes) as PNG, SVG or PDF, whole or not at all.

    The same figure gives the same file: no date is written into it.

    Raises:
        InputError: another suffix, or a place that cannot be written to.
    """
    owner: Any = figure
    while not isinstance(owner, Figure):  # Axes may stand on a figure inside a figure
        owner = owner.figure
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"cannot write {path}: figures are written as {', '.join(SUFFIXES)}; end the name in one.")
    metadata: dict[str, Any] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    with files.replacing(path) as temporary, matplotlib.rc_context({"svg.hashsalt": "sensitivity"}):
        owner.savefig(temporary, dpi=dpi, format=suffix[1:], bbox_inches="tight", metadata=metadata)


def array(values: Any) -> np.ndarray:
    """Tensors, labelled arrays and lists as float64 arrays."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double()
    return np.asarray(values, dtype=np.float64)


def step_ticks(axis: Any, bins: int = 8) -> None:
    """A few ticks at whole steps, however long the axis."""
    axis.set_major_locator(MaxNLocator(nbins=bins, integer=True, min_n_ticks=1))


def legend_beside(ax: Axes) -> None:
    """Puts the legend to the right of the Axes, where it hides nothing."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0, frameon=False, fontsize="small")


def log_if_positive(ax: Axes, *drawn: Any) -> None:
    """A logarithmic vertical axis, if there is a positive value to draw on it; call it when everything is drawn."""
    if any((array(values) > 0).any() for values in drawn):
        ax.set_yscale("log")
        log_ticks(ax.yaxis, *ax.get_ylim())


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Readable ticks on a logarithmic axis that spans less than two decades; wider ones keep their powers of ten."""
    if high >= 100 * low:
        return
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > 8 * low else MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    axis.set_minor_locator(NullLocator())


def positive(values: Any) -> np.ndarray:
    """The values, NaN where a logarithm has none; unchanged where no value is positive."""
    found = array(values)
    return np.where(found > 0, found, np.nan) if (found > 0).any() else found
