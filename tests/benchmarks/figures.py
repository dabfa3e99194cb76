"""The figures of the page: how time and memory grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from sensitivity.plot import style

COLOURS = {"forward": style.GREY, "map": style.BLUE, "statistics": style.GREEN, "generic": style.ORANGE}
AXES = {"T": "sequence length $T$", "D": "width $D$", "H": "heads $H$", "depth": "depth", "samples": "samples"}
HEADROOM = 0.5  # for the legend, as a share of what the lines span
LABELS = {"forward": "forward pass", "map": "map", "statistics": "statistics", "generic": "generic engine"}


def over_length(data: dict[str, Any], path: Path) -> None:
    """Time and memory over T."""
    found = style.grid(1, 2, 5.2, 3.8)[0]
    for axes, values, heights, law, label, scale in (
        (found[0], "values", "times", "law", "time (s)", 1.0),
        (found[1], "sizes", "memory", "memory law", "peak above rest (MiB)", 2.0**-20),
    ):
        for name, entry in data.items():
            if entry["axis"] == "T" and heights in entry and not (heights == "memory" and "forward" in name):
                _line(axes, name, entry, values, heights, law, scale)
        _finish(axes, "T", label)
    style.save(found[0].figure, path, dpi=110)


def over_sizes(data: dict[str, Any], path: Path) -> None:
    """Time over the other sizes."""
    kinds = [kind for kind in AXES if kind != "T" and any(entry["axis"] == kind for entry in data.values())]
    found = style.grid(1, max(1, len(kinds)), 3.2, 3.2)[0]
    for axes, kind in zip(found, kinds, strict=False):
        for name, entry in data.items():
            if entry["axis"] == kind:
                _line(axes, name, entry, "values", "times", "law", 1.0)
        _finish(axes, kind, "time (s)" if kind == kinds[0] else "")
    style.save(found[0].figure, path, dpi=110)


def _line(axes: Axes, name: str, entry: dict[str, Any], values: str, heights: str, law: str, scale: float) -> None:
    kind = name.partition(" ")[0]
    label = f"{LABELS[kind]}: {entry[law]['exponent']:.2f}"
    axes.plot(
        entry[values], [scale * one for one in entry[heights]], "o-", color=COLOURS[kind], label=label, markersize=4
    )


def _finish(axes: Axes, kind: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel=AXES[kind], ylabel=label)
    if axes.lines:
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top * (top / bottom) ** HEADROOM)
        axes.legend(title="exponent", loc="upper left", frameon=False, fontsize="small", title_fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)


Draw = Callable[[dict[str, Any], Path], None]
FIGURES: dict[str, list[tuple[str, str, Draw]]] = {
    "growth": [
        ("cost-length.png", "Time and memory over the sequence length, with fitted exponents", over_length),
        ("cost-sizes.png", "Time over width, heads, depth and samples, with fitted exponents", over_sizes),
    ]
}
