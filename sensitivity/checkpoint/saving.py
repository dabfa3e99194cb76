"""Writing a checkpoint."""

from __future__ import annotations

import io
import os
import platform
from typing import Any

import numpy as np
import torch
from torch import nn

from sensitivity.checkpoint.plain import plain
from sensitivity.errors import InputError
from sensitivity.files import write_bytes
from sensitivity.modules import unwrap

FORMAT = "attention-sensitivity checkpoint"
STATE = "attention-sensitivity training state"  # what a run is resumed from
VERSION = 1


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    scaler: Any = None,
    data: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
) -> None:
    """Writes one plain file that ``torch.load(path, weights_only=True)`` reads; whole or not at all.

    The file is a dict: ``format``, ``version``, ``model`` (class name), ``config``, ``weights``, ``scaler``, ``data``,
    ``metrics``, ``training`` and ``libraries`` (versions). Tensors are on the CPU.

    Args:
        path: where to write; missing folders are made.
        model: a module with a ``config`` dict from which it can be built again; compiled and parallel wrappers are
            taken off.
        scaler: plain values, or an object with a ``state()`` method that gives them.
        data: description of what the model was trained on.
        metrics: scores.
        training: seed, epochs, rates, and so on.

    Raises:
        InputError: a model without ``config``, a value that is not plain, or a folder that cannot be written to.
        RunError: the disk is full.
    """
    model = unwrap(model)
    if not isinstance(getattr(model, "config", None), dict):
        raise InputError(
            f"{type(model).__name__} has no config dict to be built again from, so a checkpoint of it could not be "
            "loaded; save its state_dict() with torch.save, and load that with a builder."
        )
    content = {
        "format": FORMAT,
        "version": VERSION,
        "model": type(model).__name__,
        "config": plain(model.config, "config"),
        "weights": {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()},
        "scaler": plain(scaler.state() if hasattr(scaler, "state") else scaler, "scaler"),
        "data": plain(data, "data"),
        "metrics": plain(metrics, "metrics"),
        "training": plain(training, "training"),
        "libraries": {
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(path, buffer.getvalue())
