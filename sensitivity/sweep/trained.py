"""The attention layers of a checkpoint's model, at windows of traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sensitivity.checkpoint import Checkpoint
from sensitivity.sweep.source import ModelLayers
from sensitivity.traffic import Scaler, Traffic, sequences

_SPLIT = ("protocol", "input_length", "horizon")


def trained_layers(
    loaded: Checkpoint,
    traffic: Traffic,
    scaler: Scaler,
    longest: int,
    layers: Sequence[str] | None = None,
    *,
    windows: int,
    per_window: int | None = None,
    seed: int = 0,
) -> ModelLayers:
    """A source for :func:`sensitivity.sweep.sweep`: test windows that end at the same times at every length.

    Args:
        loaded: the checkpoint; says how the data was split in training.
        traffic: the data to measure on.
        scaler: of the model's inputs.
        longest: the greatest length of the sweep.
        layers: names of attention layers; all by default.
        windows: how many test windows.
        per_window: sequences (sensors) of each window; all by default.
        seed: of the choice of windows and sequences.

    Raises:
        InputError: a layer that the model does not have.
    """
    parameter = next((p for p in loaded.model.parameters() if p.is_floating_point()), torch.empty(0))
    options = trained_split(loaded) | {"day_of_week": bool(loaded.config.get("day_of_week", False))}

    def draw(length: int) -> Tensor:
        found = sequences(traffic, scaler, length, windows, seed, longest=longest, **options)
        return found.to(parameter.dtype)

    return ModelLayers(loaded.model, draw, layers, _forward(loaded.model), per_window=per_window, seed=seed)


def trained_split(loaded: Checkpoint) -> dict[str, Any]:
    """How the data was split in training, as arguments of :func:`sensitivity.traffic.split`."""
    described = loaded.data or {}
    return {name: described[name] for name in _SPLIT if described.get(name) is not None}


def _forward(model: nn.Module) -> Callable[[Any, Any], Any] | None:
    """The encoder of a forecaster takes any length; the forecast itself only the one that it was trained on."""
    return (lambda module, inputs: module.encode(inputs)) if hasattr(model, "encode") else None
