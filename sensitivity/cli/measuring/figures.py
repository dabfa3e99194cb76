"""The figures of a measurement."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from sensitivity import plot
from sensitivity.sweep import Sweep

OVERLAID = ("local", "expected")
"""Bounds drawn over the decay off the diagonal. They were checked on a part of the sequences: what is drawn is the mean
sensitivity times the mean slack found there, so that no line crosses another because the sequences differ."""


def draw(found: Sweep, folder: Path) -> list[str]:
    """Draws decay, path shares, lag profiles and a heatmap for each layer; returns the names of the files."""
    drawn: dict[str, Any] = {}
    layers = found.layers
    columns = 1 if len(layers) == 1 else 2
    rows = -(-len(layers) // columns)
    if len(found.lengths) > 1:
        drawn["decay.png"] = _grid(rows, columns, 7.6, 4.4)
        for ax, layer in zip(drawn["decay.png"].flat, layers, strict=False):
            _decay(found, layer, ax)
    drawn["lag_profile.png"] = _grid(rows, columns, 6.8, 3.8)
    for ax, layer in zip(drawn["lag_profile.png"].flat, layers, strict=False):
        _lag_profile(found, layer, ax)
    for name in ("decay.png", "lag_profile.png"):
        for ax in list(drawn[name].flat)[len(layers) :] if name in drawn else []:
            ax.set_visible(False)
    shares = {layer: _shares(found, layer) for layer in layers}
    drawn["path_shares.png"] = plot.path_shares(shares, title=f"T={found.lengths[-1]}")
    drawn |= {f"heatmap_{_file(layer)}.png": _heatmaps(found, layer) for layer in layers if found.kept(layer)}
    for name, axes in drawn.items():
        plot.save(axes if not hasattr(axes, "flat") else axes[0, 0], folder / name)
    return list(drawn)


def _decay(found: Sweep, layer: str, ax: Any) -> None:
    lengths = [T for T in found.lengths if found.record(layer, T).statistics["off_diagonal"] > 0]
    lengths = lengths or list(found.lengths)
    bounds = {}
    mean = [float(found.record(layer, T).statistics["off_diagonal"]) for T in lengths]
    for name in OVERLAID:
        verdicts = [found.record(layer, T).bounds.get(name) for T in lengths]
        slack = [math.nan if verdict is None else verdict.slack for verdict in verdicts]
        if not all(map(math.isnan, slack)):
            bounds[name] = [value * factor for value, factor in zip(mean, slack, strict=True)]
    plot.decay(
        lengths,
        _by_unit(found, layer, "off_diagonal", lengths),
        _by_unit(found, layer, "diagonal", lengths),
        bounds=bounds,
        fits={name: found.decay(layer, name) for name in ("off_diagonal", "diagonal")},
        ax=ax,
        norm=found.norm,
        title=layer,
    )


def _lag_profile(found: Sweep, layer: str, ax: Any) -> None:
    """The profile at the longest length: of the map, or as it was summed up where no map was kept."""
    length = found.lengths[-1]
    title = f"{layer}, T={length}"
    if length in found.kept(layer):
        plot.lag_profile(found.map(layer), ax=ax, title=title)
    else:
        plot.lag_profile(found.record(layer).profiles["lag"], ax=ax, norm=found.norm, title=title)


def _shares(found: Sweep, layer: str) -> dict[str, dict[str, float]]:
    """Shares of the paths on and off the diagonal at the longest length."""
    one, shares = found.record(layer).statistics, {}
    for part in ("diagonal", "off_diagonal"):
        means = {name: float(one.get(f"{part}_{name}", 0.0)) for name in ("residual", "value", "key", "query")}
        total = math.fsum(means.values())
        shares[part] = {name: mean / total if total else math.nan for name, mean in means.items()}
    return shares


def _by_unit(found: Sweep, layer: str, statistic: str, lengths: list[int]) -> torch.Tensor:
    """Means over the samples of each independent unit, ``(unit, length)``."""
    values = [found.record(layer, length).by_unit(statistic) for length in lengths]
    common = sorted(set.intersection(*map(set, values)))
    return torch.tensor([[one[unit] for one in values] for unit in common], dtype=torch.float64)


def _heatmaps(found: Sweep, layer: str) -> Any:
    """The mean map of every length that was kept: that of training, and the longest."""
    kept = found.kept(layer)
    axes = _grid(1, len(kept), 5.6, 4.8)
    for ax, length in zip(axes.flat, kept, strict=True):
        plot.heatmap(found.map(layer, length), ax=ax, title=f"{layer}, T={length}")
    return axes


def _grid(rows: int, columns: int, width: float, height: float) -> Any:
    return plot.grid(rows, columns, width=width, height=height)


def _file(layer: str) -> str:
    """The layer's name as part of a file's name."""
    return re.sub(r"[^\w.@-]+", "_", layer) or "layer"
