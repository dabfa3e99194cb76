"""A map of all pairs of query and key times."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter
from matplotlib.transforms import ScaledTranslation
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.plot import style
from sensitivity.result import Measurement, SensitivityMap
from sensitivity.statistics import mean_map

DECADES = 6  # a logarithmic scale reaches this far below the largest value; what is smaller takes the lowest colour


def heatmap(
    values: Any,
    visible: Any = None,
    ax: Axes | None = None,
    *,
    path: str | None = None,
    sample: int | None = None,
    title: str | None = None,
    label: str | None = None,
    log: bool = True,
    limits: tuple[float, float] | None = None,
    cells: int = 256,
    legend: bool = True,
    bar: bool = True,
) -> Axes:
    """Draws a map: queries downwards, keys to the right; zeros and masked pairs in colours of their own.

    Args:
        values: a :class:`SensitivityMap`, or norms ``(query, key)`` or ``(sample, query, key)``; samples are averaged.
            Of a map of some rows these are drawn, at their query times.
        visible: the pairs that count, of the same shape; all unless given, or those of the map.
        ax: where to draw; new Axes unless given.
        path: one path's norms instead of the total (maps only).
        sample: one sample instead of the mean.
        title: unless given, the map's name.
        label: of the colour scale; unless given, the norm.
        log: logarithmic colours, over six decades at most, from the finite positive pairs.
        limits: lowest and highest value of the colour scale, to compare several maps.
        cells: a longer map is drawn in blocks, each in the colour of its largest visible value, and says so.
        legend: whether to explain the colours of zeros and masked pairs.
        bar: whether to draw the colour bar; one may serve several maps of the same ``limits``.

    Raises:
        InputError: a visible value that is negative or not finite; axes that are not (query, key).
    """
    times = None
    if isinstance(values, Measurement):
        if not isinstance(values, SensitivityMap):
            raise InputError("statistics hold no map to draw; measure with keep='map', or some query rows with rows=.")
        title = (
            title if title is not None else " ".join(part for part in (values.name, path and f"({path} path)") if part)
        )
        label = label or style.NORM_LABELS[values.norm]
        norms = values.norms if path is None else values.path(path)
        if len(values.query_times) < values.length:
            times, order = values.query_times.sort()
            values, visible = norms[:, order], values.visible[:, order]
        else:
            values, visible = norms, values.visible
    shown, mask = _mean(values, visible, sample)
    _check(shown, mask)
    block = max(1, -(-max(shown.shape) // cells))
    image, seen = _blocks(np.where(mask, shown, -1.0), block)
    ax = style.axes(ax, 5.6, 4.8)
    size = (image.shape[0] * block, image.shape[1] * block)
    extent = (-0.5, size[1] - 0.5, size[0] - 0.5, -0.5)
    _background(ax, image, seen, extent)
    _colours(ax, np.ma.masked_where(~(image > 0), image), extent, log, limits, _label(label, block) if bar else None)
    ax.set(xlim=(-0.5, shown.shape[1] - 0.5), ylim=(shown.shape[0] - 0.5, -0.5), xlabel=style.KEY, ylabel=style.QUERY)
    ax.set_aspect("equal" if shown.shape[0] == shown.shape[1] else "auto")
    style.step_ticks(ax.xaxis)
    style.step_ticks(ax.yaxis)
    if times is not None:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda row, _: _time(times, row)))
        ax.set_ylabel(f"{style.QUERY}, {len(times)} rows")
    if title:
        ax.set_title(title, fontsize="medium")
    if legend:
        _legend(ax, zeros=bool((seen & (image == 0)).any()), masked=bool((~seen).any()))
    return ax


def _time(times: Tensor, row: float) -> str:
    """The query time of a row that is one of some."""
    return str(int(times[round(row)])) if 0 <= round(row) < len(times) else ""


def _mean(values: Any, visible: Any, sample: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The map to draw and its visible pairs, both ``(query, key)``."""
    norms = torch.as_tensor(values).detach().cpu().double()
    if norms.ndim not in (2, 3) or norms.numel() == 0:
        raise InputError(f"a heatmap needs (query, key) or (sample, query, key), not the shape {tuple(norms.shape)}.")
    mask = torch.ones_like(norms, dtype=torch.bool) if visible is None else torch.as_tensor(visible).cpu()
    if mask.shape != norms.shape:
        raise InputError(f"visible has shape {tuple(mask.shape)}, but the map has {tuple(norms.shape)}.")
    norms, mask = norms.reshape(-1, *norms.shape[-2:]), mask.reshape(-1, *norms.shape[-2:])
    if sample is not None:
        if not 0 <= sample < len(norms):
            raise InputError(f"there is no sample {sample}; the map has {len(norms)}, counted from 0.")
        norms, mask = norms[sample : sample + 1], mask[sample : sample + 1]
    return mean_map(norms, mask).numpy(), mask.any(dim=0).numpy()


def _check(shown: np.ndarray, mask: np.ndarray) -> None:
    bad = mask & ~(np.isfinite(shown) & (shown >= 0))
    if bad.any():
        query, key = (int(part) for part in np.argwhere(bad)[0])
        raise InputError(
            f"the value at (query, key) = ({query}, {key}) is {shown[query, key]}; a heatmap draws finite values "
            "from 0 up: mark pairs that do not count with visible=."
        )


def _blocks(shown: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Largest value of every ``block x block`` square, and whether any of its pairs is visible (not -1)."""
    queries, keys = (-(-size // block) for size in shown.shape)
    padded = np.full((queries * block, keys * block), -1.0)
    padded[: shown.shape[0], : shown.shape[1]] = shown
    image = padded.reshape(queries, block, keys, block).max(axis=(1, 3))
    return image, image >= 0


def _background(ax: Axes, image: np.ndarray, seen: np.ndarray, extent: tuple[float, float, float, float]) -> None:
    colours = np.where(seen[..., None], to_rgb(style.ZERO), to_rgb(style.MASKED))
    ax.imshow(colours, extent=extent, interpolation="nearest", aspect="auto")


def _colours(
    ax: Axes,
    image: np.ma.MaskedArray,
    extent: tuple[float, float, float, float],
    log: bool,
    limits: tuple[float, float] | None,
    label: str | None,
) -> None:
    """The positive cells and their colour scale, with a bar if there is a label; no scale where none is positive."""
    if limits is None and image.count() == 0:
        return
    low, high = limits or (float(image.min()), float(image.max()))
    cut = log and low < high * 10.0**-DECADES
    low = high * 10.0**-DECADES if cut else low
    single = not low < high
    span = (low * 0.8, high * 1.25) if single else (low, high)
    norm = LogNorm(*span) if log else Normalize(low if limits else 0.0, span[1])
    colours = matplotlib.colormaps[style.COLOUR_MAP].with_extremes(bad=(0, 0, 0, 0))
    drawn = ax.imshow(image, cmap=colours, norm=norm, extent=extent, interpolation="nearest", aspect="auto")
    if label is None:
        return
    figure = ax.get_figure()
    assert figure is not None
    bar = figure.colorbar(drawn, ax=ax, extend="min" if cut else "neither", label=label, shrink=0.9)
    if single:
        bar.ax.yaxis.set_major_locator(FixedLocator([high]))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        bar.ax.minorticks_off()
    elif log:
        style.log_ticks(bar.ax.yaxis, *span)


def _label(label: str | None, block: int) -> str:
    label = label or style.NORM_LABELS["frobenius"].split(" (")[0]
    return label if block == 1 else f"{label}\neach cell: largest of {block} x {block} pairs"


def _legend(ax: Axes, zeros: bool, masked: bool) -> None:
    patches = []
    if masked:
        patches.append(Patch(facecolor=style.MASKED, edgecolor="black", linewidth=0.5, label="masked"))
    if zeros:
        patches.append(Patch(facecolor=style.ZERO, edgecolor="black", linewidth=0.5, label="exactly zero"))
    if patches:
        figure = ax.get_figure()
        assert figure is not None
        # A distance in points, not in shares of the Axes, clears the axis label at every size.
        below = ScaledTranslation(0, -36 / 72, figure.dpi_scale_trans)
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.0), "borderaxespad": 0.0}
        place["bbox_transform"] = ax.transAxes + below
        ax.legend(handles=patches, ncols=2, frameon=False, fontsize="small", **place)
