"""Scores of a trained model and of the naive forecasts, on the same test windows by the same metric."""

from __future__ import annotations

import torch
from torch import nn

from sensitivity.models.naive import forecasts
from sensitivity.traffic import Scaler, Split, Windows
from sensitivity.training.metrics import MaskedMetrics, Scores, score
from sensitivity.training.precision import autocast

BATCH = 512


def evaluate(model: nn.Module, scaler: Scaler, windows: Windows, size: int = BATCH, precision: str = "32") -> Scores:
    """Errors of the model over all ``windows`` at once, in evaluation mode; the mode is put back after.

    Args:
        model: maps inputs to z-scores ``(batch, horizon, node)``.
        scaler: from z-scores to mph.
        windows: on the model's device.
        size: windows in a forward pass; the result does not depend on it.
        precision: of the network, ``32`` or ``bf16``.

    Raises:
        RunError: a forecast that is not finite, or no valid target at all.
    """
    metrics, training = MaskedMetrics(), model.training
    model.eval()
    try:
        with torch.no_grad():
            for window in windows.batches(size):
                with autocast(window.inputs.device.type, precision):
                    scaled = model(window.inputs)
                metrics.update(scaler.inverse(scaled.float()), window.target, window.mask)
    finally:
        model.train(training)
    return metrics.compute()


def naive_scores(split: Split) -> dict[str, Scores]:
    """Errors of the naive forecasts on the test windows, by name."""
    return {name: score(forecast, split.test) for name, forecast in forecasts(split).items()}
