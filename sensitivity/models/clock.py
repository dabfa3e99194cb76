"""What a model is told about the time of its inputs."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.errors import InputError

DAYS = 7


def channels(day_of_week: bool) -> int:
    """Input channels of a model: speed, time of day, and the day of the week if it takes it."""
    return 3 if day_of_week else 2


def check_inputs(inputs: Tensor, nodes: int, day_of_week: bool) -> None:
    """Refuses inputs of another shape than a model was built for.

    Raises:
        InputError: another number of nodes or channels, or no time step.
    """
    count = channels(day_of_week)
    if inputs.ndim == 4 and inputs.shape[2:] == (nodes, count) and inputs.shape[1] >= 1:
        return
    what = "z-scored speed, time of day and day of week" if day_of_week else "z-scored speed and time of day"
    raise InputError(
        f"inputs have the shape {tuple(inputs.shape)}; this model takes (batch, time, {nodes}, {count}): {what} of "
        "every node."
    )


def day_number(channel: Float[Tensor, "*axes"]) -> Int[Tensor, "*axes"]:
    """0 on Monday to 6 on Sunday, from the input channel, which has sevenths."""
    return (channel * DAYS).round().long() % DAYS


def clock(inputs: Float[Tensor, "batch time node channel"], day_of_week: bool) -> Float[Tensor, "batch node time part"]:
    """Time of day, and one indicator for each day of the week if the model takes it."""
    time = inputs[..., 1:2]
    if day_of_week:
        days = torch.arange(DAYS, device=inputs.device)
        time = torch.cat([time, (day_number(inputs[..., 2:3]) == days).to(time.dtype)], dim=-1)
    return time.transpose(1, 2)
