"""Profiles of a map: by lag, and by key."""

from __future__ import annotations

from typing import Any

import numpy as np
import seaborn
from matplotlib.axes import Axes

from sensitivity.errors import InputError
from sensitivity.plot import style
from sensitivity.result import Measurement


def lag_profile(
    profile: Any, ax: Axes | None = None, *, norm: str = "frobenius", label: str | None = None, title: str | None = None
) -> Axes:
    """Draws mean sensitivity by lag ``i - j``; a map is drawn raw and with the residual path removed.

    Args:
        profile: a :class:`SensitivityMap`, its statistics, or the profile ``(lag,)`` of length ``2T - 1``.
        ax: where to draw; new Axes unless given.
        norm: which norm was measured (maps know theirs).
        label: in the legend.
        title: of the Axes.

    Raises:
        InputError: a profile that is not one-dimensional and of odd length.
    """
    if isinstance(profile, Measurement):
        lines = {label or "raw": profile.lag_profile()}
        if profile.has_removed:
            lines["residual removed"] = profile.lag_profile(residual_removed=True)
        norm, title = profile.norm, title if title is not None else profile.name
    else:
        lines = {label or "": profile}
    drawn = {name: style.array(values) for name, values in lines.items()}
    for values in drawn.values():
        if values.ndim != 1 or len(values) % 2 == 0:
            raise InputError(f"a lag profile has the shape (2T - 1,), not {values.shape}.")
    ax = style.axes(ax, 6.8, 3.8)
    for index, (name, values) in enumerate(drawn.items()):
        reach = len(values) // 2
        _line(ax, np.arange(-reach, reach + 1), values, name, index)
    ax.axvline(0, color="0.7", linewidth=0.8, zorder=0)
    _finish(ax, style.LAG, norm, title, list(drawn.values()))
    return ax


def primacy_profile(
    profile: Any, ax: Axes | None = None, *, norm: str = "frobenius", label: str | None = None, title: str | None = None
) -> Axes:
    """Draws mean sensitivity by key time; arguments as in :func:`lag_profile`, with a profile ``(key,)``."""
    if isinstance(profile, Measurement):
        lines = {label or "raw": profile.primacy_profile()}
        if profile.has_removed:
            lines["residual removed"] = profile.primacy_profile(residual_removed=True)
        norm, title = profile.norm, title if title is not None else profile.name
    else:
        lines = {label or "": profile}
    drawn = {name: style.array(values) for name, values in lines.items()}
    ax = style.axes(ax, 6.8, 3.8)
    for index, (name, values) in enumerate(drawn.items()):
        if values.ndim != 1:
            raise InputError(f"a primacy profile has the shape (key,), not {values.shape}.")
        _line(ax, np.arange(len(values)), values, name, index)
    _finish(ax, style.KEY, norm, title, list(drawn.values()))
    return ax


def _line(ax: Axes, x: np.ndarray, values: np.ndarray, name: str, index: int) -> None:
    colour = (style.OFF_DIAGONAL, style.REMOVED)[index % 2]
    shown = style.positive(values)
    zeros = int((values == 0).sum()) if (values > 0).any() else 0
    label = ", ".join(part for part in (name, f"{zeros} exact zeros not shown" if zeros else "") if part)
    marker = "o" if len(x) <= 64 else None
    style_of: dict[str, Any] = {"color": colour, "linestyle": ("-", "--")[index % 2]}  # both show where they coincide
    ax.plot(x, shown, marker=marker, markersize=4, linewidth=1.4, label=label or None, **style_of)
    if x[0] < 0 and marker is None:  # the diagonal is one step wide: mark it in a long profile
        ax.plot([0], shown[x == 0], marker="o", markersize=4, color=colour)


def _finish(ax: Axes, xlabel: str, norm: str, title: str | None, drawn: list[np.ndarray]) -> None:
    style.log_if_positive(ax, *drawn)
    if ax.get_yscale() == "linear":
        ax.set_ylim(-0.05, 1.0)
    ax.set(xlabel=xlabel, ylabel=f"mean {style.NORM_LABELS[norm]}")
    style.step_ticks(ax.xaxis)
    if title:
        ax.set_title(title, fontsize="medium")
    seaborn.despine(ax=ax)
    style.legend_beside(ax)
