"""Sensitivity against sequence length, with fitted exponents and bounds on the same axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import seaborn
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from sensitivity.errors import InputError
from sensitivity.fit import Decay
from sensitivity.plot import style

BAND = (10, 90)  # percentiles of the samples
_FIT = "fit"
_DASHES = ("--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 3)))


def decay(
    lengths: Sequence[int],
    off_diagonal: Any,
    diagonal: Any = None,
    bounds: Mapping[str, Any] | None = None,
    fits: Mapping[str, Decay | None] | None = None,
    ax: Axes | None = None,
    *,
    norm: str = "frobenius",
    reference: bool = True,
    title: str | None = None,
) -> Axes:
    """Draws mean sensitivity on and off the diagonal over the length, both axes logarithmic.

    The line is the mean over samples, the band runs from the 10th to the 90th percentile of the samples. Values that
    are zero or undefined (no pair off the diagonal at T = 1) have no place on a logarithmic axis and are left out.

    Args:
        lengths: sequence lengths.
        off_diagonal: mean sensitivity off the diagonal, ``(sample, length)``.
        diagonal: the same on the diagonal.
        bounds: name to values ``(length,)``; dashed.
        fits: ``{"off_diagonal": Decay, "diagonal": Decay}``, drawn thin, with their exponents in the legend.
        ax: where to draw; new Axes unless given.
        norm: which norm was measured.
        reference: whether to draw the slope 1/T through the first point off the diagonal.
        title: of the Axes.

    Raises:
        InputError: arrays that do not fit the lengths.
    """
    x = style.array(lengths)
    order = np.argsort(x)
    fits = fits or {}
    ax = style.axes(ax, 7.6, 4.4)
    ax.set_xscale("log")
    series = [("diagonal", "on the diagonal", diagonal, style.DIAGONAL, "s")]
    series.append(("off_diagonal", "off the diagonal", off_diagonal, style.OFF_DIAGONAL, "o"))
    for name, label, values, colour, marker in series:
        if values is not None:
            table = _table(values, len(x), name)[:, order]
            _measured(ax, x[order], table, label, colour, marker, fits.get(name))
    if reference:
        _reference(ax, x[order], _table(off_diagonal, len(x), "off_diagonal").mean(axis=0)[order])
    for index, (name, bound) in enumerate((bounds or {}).items()):
        line = _table(style.array(bound)[None], len(x), f"bound {name!r}")[0, order]
        dash, colour = _DASHES[index % len(_DASHES)], style.BOUND_COLOURS[index % len(style.BOUND_COLOURS)]
        ax.plot(x[order], style.positive(line), linestyle=dash, color=colour, linewidth=1.5, label=f"bound: {name}")
    _shared_labels(ax)
    _length_axis(ax, x[order])
    style.log_if_positive(ax, *(line.get_ydata() for line in ax.lines))
    ax.set(xlabel=style.LENGTH, ylabel=f"mean {style.NORM_LABELS[norm]}")
    if title:
        ax.set_title(title, fontsize="medium")
    seaborn.despine(ax=ax)
    style.legend_beside(ax)
    return ax


def _table(values: Any, lengths: int, name: str) -> np.ndarray:
    table = style.array(values)
    if table.ndim != 2 or table.shape[1] != lengths or len(table) == 0:
        raise InputError(f"{name} has shape {table.shape}, but {lengths} lengths need (sample, {lengths}).")
    return table


def _measured(
    ax: Axes, x: np.ndarray, table: np.ndarray, label: str, colour: str, marker: str, fit: Decay | None
) -> None:
    usable = (np.isfinite(table) & (table >= 0)).all(axis=0)
    mean = np.where(usable, table.mean(axis=0), np.nan)
    usable &= mean > 0
    if not usable.any():
        ax.plot([], [], marker=marker, color=colour, label=f"{label}: exactly zero or undefined")
        return
    label = label if fit is None else f"{label}: {_exponent(fit)}"
    ax.plot(x[usable], mean[usable], marker=marker, markersize=5, color=colour, linewidth=1.6, label=label)
    if len(table) > 1:
        low, high = np.percentile(table[:, usable], BAND, axis=0)
        floor = np.maximum(low, high * 1e-6)
        ax.fill_between(x[usable], floor, high, color=colour, alpha=0.18, linewidth=0)
    if fit is not None:
        ends = np.array([min(fit.lengths), max(fit.lengths)])
        ax.plot(ends, fit.predict(ends).numpy(), color="black", linewidth=0.8, gid=_FIT)


def _exponent(fit: Decay) -> str:
    exponent, low, high = (round(value, 2) + 0.0 for value in (fit.exponent, *fit.interval))  # + 0.0: no "-0.00"
    interval = "" if math.isnan(low) else f" [{low:.2f}, {high:.2f}]"
    return f"$b$ = {exponent:.2f}{interval}"


def _shared_labels(ax: Axes) -> None:
    """One legend entry for all bands, and one for all fits."""
    fits = [line for line in ax.lines if line.get_gid() == _FIT]
    if fits:
        fits[0].set_label("fitted $T^{-b}$")
    if ax.collections:
        ax.fill_between([], [], [], color="0.5", alpha=0.3, linewidth=0, label="10 to 90 % of samples")


def _reference(ax: Axes, x: np.ndarray, mean: np.ndarray) -> None:
    start = np.flatnonzero(np.isfinite(mean) & (mean > 0))
    if len(start) and len(x) > 1:
        first = start[0]
        line = mean[first] * x[first] / x[first:]
        ax.plot(x[first:], line, color="0.45", linestyle=":", linewidth=1.4, label="slope $1/T$")


def _length_axis(ax: Axes, x: np.ndarray) -> None:
    """Ticks at measured lengths that lie far enough apart to be read."""
    span = math.log(x[-1] / x[0]) if len(x) > 1 else 1.0
    ticks: list[float] = []
    for length in x:
        if not ticks or math.log(length / ticks[-1]) > span / 11:
            ticks.append(float(length))
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(ScalarFormatter())
    if len(x) == 1:
        ax.set_xlim(x[0] / 2, x[0] * 2)
