"""One look at the attention layers of a model in training: the statistics of its sensitivities, cheap and unnoticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sensitivity.adapters.capture import Forward, capture
from sensitivity.errors import InputError
from sensitivity.jacobian.guard import measuring
from sensitivity.jacobian.state import kept_parts
from sensitivity.measure import measure
from sensitivity.modules import unwrap

SAMPLES = 32


def diagnose(
    model: nn.Module,
    inputs: Any,
    *,
    layers: Sequence[str] | None = None,
    samples: int = SAMPLES,
    forward: Forward | None = None,
) -> dict[str, dict[str, float]]:
    """Sink ratio, parroting index, diagonal attention mass and path shares of every attention layer.

    The model runs once on ``inputs``, in evaluation mode; the layers are then measured in closed form at the tokens
    that reached them. Made for training loops: mode, gradients, buffers and random states of the model and of torch are
    afterwards as they were, so a training goes on bit by bit as without it.

    Args:
        model: a model with softmax attention layers that the adapters know, in any mode.
        inputs: what it is called with: a few windows are enough.
        layers: names of attention layers; all that run by default.
        samples: measure at most so many of the sequences that reach a layer, spread evenly over them. Where a model
            has a sequence for each sensor of each window, that many of all these.
        forward: how the model is called, ``forward(model, inputs)``; ``model(inputs)`` unless given.

    Returns:
        For every layer what :meth:`sensitivity.SensitivityMap.summary` holds: ``sink_ratio``, ``parroting_index`` (both
        also with ``_residual_removed``), ``diagonal_attention``, ``key_sink``, ``row_entropy`` and their null values,
        and the path shares ``diagonal_share_PATH`` and ``off_diagonal_share_PATH``.

    Raises:
        InputError: no attention layer that can be described, an unknown name, or ``samples`` below 1.

    Examples:
        >>> from sensitivity.models import Forecaster
        >>> model = Forecaster(nodes=3, dim=8, depth=2, heads=2)
        >>> found = diagnose(model, torch.rand(4, 12, 3, 2))
        >>> sorted(found), model.training
        (['blocks.0.temporal', 'blocks.1.temporal'], True)
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise InputError(f"samples must be an integer of at least 1, not {samples!r}.")
    model = unwrap(model)
    found = {}
    with kept_parts(model.modules()):
        model.eval()
        with measuring(model), torch.no_grad():
            captured = capture(model, inputs, None if layers is None else list(layers), forward)
        for name, layer in captured.items():
            count = len(layer.tokens)
            chosen = torch.arange(min(samples, count), device=layer.tokens.device) * count // min(samples, count)
            at = measure(layer.attention.sample(chosen), layer.tokens[chosen], paths=True)
            found[name] = at.summary()
    return found
