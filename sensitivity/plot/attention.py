"""Attention weights: one head's map, and the mass on the diagonal of every head."""

from __future__ import annotations

from typing import Any

import numpy as np
import seaborn
import torch
from matplotlib.axes import Axes
from torch import Tensor

from sensitivity import statistics
from sensitivity.errors import InputError
from sensitivity.plot import style
from sensitivity.plot.heatmap import heatmap
from sensitivity.result import Measurement, SensitivityMap


def attention(
    weights: Any, attended: Tensor | None = None, ax: Axes | None = None, *, head: int | None = None, **changes: Any
) -> Axes:
    """Draws attention weights, averaged over samples, of one head or averaged over all.

    Args:
        weights: a :class:`SensitivityMap`, or weights before dropout, ``(sample, head, query, key)``.
        attended: the pairs that the mask lets attend, broadcastable to the weights; all unless given.
        ax: where to draw; new Axes unless given.
        head: which head; the mean of all unless given.
        **changes: as in :func:`sensitivity.plot.heatmap`.

    Raises:
        InputError: no weights, or no such head.
    """
    found, mask, name = _weights(weights, attended)
    if head is not None and not 0 <= head < found.shape[1]:
        raise InputError(f"there is no head {head}; the layer has {found.shape[1]}, counted from 0.")
    chosen = slice(None) if head is None else slice(head, head + 1)
    which = "mean of all heads" if head is None else f"head {head}"
    options: dict[str, Any] = {
        "log": False,
        "label": "attention weight",
        "title": f"{name}: {which}" if name else which,
    } | changes
    return heatmap(found[:, chosen].flatten(0, 1), mask[:, chosen].flatten(0, 1), ax, **options)


def diagonal_mass(
    weights: Any, attended: Tensor | None = None, ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """Draws the mean weight on the diagonal of every head, against that of uniform attention.

    Arguments as in :func:`attention`.

    Raises:
        InputError: no weights, or rows that do not sum to 1.
    """
    name = weights.name if isinstance(weights, Measurement) else ""
    if isinstance(weights, Measurement):
        mass = weights.diagonal_attention()
    else:
        mass = statistics.diagonal_attention(*_weights(weights, attended)[:2])
    heads = style.array(mass.heads)
    ax = style.axes(ax, max(6.0, 2.5 + 0.35 * len(heads)), 3.4)
    ax.bar(np.arange(len(heads)), heads, color=style.DIAGONAL, width=0.7, label="on the diagonal")
    ax.axhline(mass.null, color="black", linestyle="--", linewidth=1.2, label=f"uniform attention: {mass.null:.3g}")
    ax.set(xlabel="head", ylabel="mean attention weight $a_{ii}$", xlim=(-0.6, len(heads) - 0.4))
    ax.set_ylim(0, 1.1 * max(float(np.nanmax(heads)), mass.null, 1e-3))
    style.step_ticks(ax.xaxis, 12)
    ax.set_title(title if title is not None else name, fontsize="medium")
    seaborn.despine(ax=ax)
    style.legend_beside(ax)
    return ax


def _weights(weights: Any, attended: Tensor | None) -> tuple[Tensor, Tensor, str]:
    """Weights, the pairs that attend (both ``(sample, head, query, key)``), and the layer's name."""
    name = ""
    if isinstance(weights, Measurement):
        if not isinstance(weights, SensitivityMap) or weights.attention is None:
            raise InputError("this map holds no attention weights; measure an attention layer, with layer=NAME.")
        name, attended = weights.name, weights.attended_pairs()
        weights = weights.attention
    found = torch.as_tensor(weights).detach().cpu()
    if found.ndim != 4:
        raise InputError(f"attention weights have the axes (sample, head, query, key), not {tuple(found.shape)}.")
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool) if attended is None else attended.cpu()
    return found, mask.expand(found.shape), name
