"""An example map, and what a figure of it shows."""

from __future__ import annotations

import math

import numpy as np
import torch
from oracles import draw

from sensitivity.result import SensitivityMap


def example(length=12, causal=False, padded=0, samples=2):
    real = (torch.arange(length) >= padded).expand(samples, length)
    visible = real[:, :, None] & real[:, None, :]
    if causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    norms = (draw(samples, length, length).abs() + 0.1) * visible
    attention = draw(samples, 3, length, length).masked_fill(~visible[:, None], -math.inf).softmax(-1).nan_to_num()
    return SensitivityMap(
        norms,
        diagonal=draw(samples, length, seed=1).abs(),
        paths={"residual": torch.eye(length).expand(samples, -1, -1).double(), "value": norms, "key": 2 * norms},
        attention=attention,
        visible=visible,
        name="blocks.0.temporal",
    )


def words(ax):
    legend = ax.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def rendered(ax):
    """Draws the figure, which is where bad scales and ticks fail; returns its text boxes by axis."""
    figure = ax.figure
    figure.canvas.draw()
    return [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]


def background(ax):
    return np.asarray(ax.images[0].get_array())
