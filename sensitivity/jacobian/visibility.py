"""Which pairs of times a mask lets attend, and which of them count in a statistic."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention


def attended_and_counted(
    attention: SoftmaxAttention, length: int, rows: Int[Tensor, " row"] | None = None
) -> tuple[Bool[Tensor, "#sample #head row key"], Bool[Tensor, "#sample row key"]]:
    """The pairs that the mask lets attend, and the pairs that count: those, and the diagonal.

    The diagonal counts whatever the mask says, since the residual and query paths live there. Nothing counts in the
    rows and columns of padding.

    Args:
        attention: the layer, with its masks.
        length: number of tokens.
        rows: the query times that are wanted; all of them by default.
    """
    keys = torch.arange(length, device=attention.device)
    rows = keys if rows is None else rows
    attended = ~attention.hidden(length, rows)
    counted = attended.any(dim=1) | (keys == rows[:, None])
    if attention.padding is None:
        return attended, counted
    attended = attended & ~attention.padding[:, None, rows, None]
    return attended, counted & ~left_out(attention.padding, rows)


def left_out(
    padding: Bool[Tensor, "sample time"], rows: Int[Tensor, " row"] | None = None
) -> Bool[Tensor, "sample row time"]:
    """The rows and columns of padded positions; all rows, or some."""
    return (padding if rows is None else padding[:, rows])[:, :, None] | padding[:, None, :]
