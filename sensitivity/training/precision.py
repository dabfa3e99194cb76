"""In which arithmetic a network runs."""

from __future__ import annotations

import torch


def autocast(device: str, precision: str) -> torch.autocast:
    """A context in which products are computed in bfloat16 (``bf16``) or as they are (``32``).

    Args:
        device: its type.
        precision: ``32`` or ``bf16``.
    """
    return torch.autocast(device, torch.bfloat16, enabled=precision == "bf16")
