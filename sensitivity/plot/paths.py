"""How much each path contributes, on and off the diagonal, per layer or per length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import seaborn
from matplotlib.axes import Axes

from sensitivity.errors import InputError
from sensitivity.plot import style
from sensitivity.result import Measurement

PARTS = {"diagonal": "on", "off_diagonal": "off"}


def path_shares(
    shares: Mapping[Any, Any] | Measurement,
    ax: Axes | None = None,
    *,
    part: str | None = None,
    title: str | None = None,
) -> Axes:
    """Draws one stacked bar per layer or length and part of the map.

    Args:
        shares: what is compared, in order: layer names or lengths to what
            :func:`sensitivity.statistics.path_shares` returns, or to a :class:`SensitivityMap` or its statistics; or
            one of these alone.
        ax: where to draw; new Axes unless given.
        part: ``diagonal`` or ``off_diagonal``; both unless given.
        title: of the Axes.

    Raises:
        InputError: nothing to draw, or an unknown part.
    """
    if isinstance(shares, Measurement):
        shares = {shares.name or f"T={shares.length}": shares}
    if not shares:
        raise InputError("there are no path shares to draw; give at least one layer or length.")
    if part is not None and part not in PARTS:
        raise InputError(f"unknown part {part!r}; choose diagonal, off_diagonal, or None for both.")
    parts = [part] if part else list(PARTS)
    bars = _bars(shares, parts)
    ax = style.axes(ax, 7.2, 1.4 + 0.3 * len(bars))
    names = list(dict.fromkeys(name for _, _, found in bars for name in found))
    for name in names:
        left = [_before(found, names, name) for _, _, found in bars]
        width = [_number(found.get(name)) for _, _, found in bars]
        colour = style.PATH_COLOURS.get(name, style.PINK)
        ax.barh([y for y, _, _ in bars], width, left=left, color=colour, height=0.8, label=name, linewidth=0)
    for y, _, found in bars:
        if all(math.isnan(value) for value in found.values()):
            ax.text(0.01, y, "no sensitivity", va="center", fontsize="small", color="0.3")
    ax.set_yticks([y for y, _, _ in bars], [label for _, label, _ in bars], fontsize="small")
    ax.set(xlim=(0, 1), ylim=(bars[-1][0] + 0.6, bars[0][0] - 0.6), xlabel=_meaning(part))
    if title:
        ax.set_title(title, fontsize="medium")
    seaborn.despine(ax=ax, left=True)
    ax.tick_params(axis="y", length=0)
    style.legend_beside(ax)
    return ax


def _bars(shares: Mapping[Any, Any], parts: list[str]) -> list[tuple[float, str, dict[str, float]]]:
    """Position, label and shares of every bar; the bars of one entry stand together."""
    bars, y = [], 0.0
    for key, entry in shares.items():
        name = f"T={key}" if isinstance(key, int | np.integer) else str(key)
        found = entry.path_shares() if isinstance(entry, Measurement) else entry
        for part in parts:
            label = name if len(parts) == 1 else f"{name}, {PARTS[part]}"
            bars.append((y, label, {path: float(share) for path, share in found[part].items()}))
            y += 0.9
        y += 0.4 if len(parts) > 1 else 0.1
    return bars


def _number(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def _before(found: dict[str, float], names: list[str], name: str) -> float:
    return math.fsum(_number(found.get(earlier)) for earlier in names[: names.index(name)])


def _meaning(part: str | None) -> str:
    if part is None:
        return "share of the sensitivity on / off the diagonal, by path"
    return f"share of the sensitivity {PARTS[part]} the diagonal, by path"
