"""Forecasts that need no training, which every trained model must beat.

Each returns speeds in mph, ``(window, horizon, node)``, for the windows it is given. A forecast sees only readings at
or before the last input row of its window, or, for the historical average, training and validation rows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float32
from torch import Tensor

from sensitivity.traffic import Split, Traffic, Windows


def last_value(windows: Windows) -> Float32[Tensor, "window horizon node"]:
    """The last input reading, at every horizon; where it is missing, 0 mph, as the file has it."""
    return _repeat(windows.speed[windows.last_rows()], windows.horizon)


def last_nonzero(windows: Windows) -> Float32[Tensor, "window horizon node"]:
    """The last valid reading, however far before the window it lies; 0 mph where there never was one."""
    rows = torch.arange(len(windows.speed), device=windows.speed.device)[:, None]
    latest = torch.where(windows.valid, rows, -1).cummax(dim=0).values[windows.last_rows()]
    found = windows.speed.gather(0, latest.clamp_min(0))
    return _repeat(torch.where(latest >= 0, found, 0.0), windows.horizon)


def historical_average(split: Split, windows: Windows | None = None) -> Float32[Tensor, "window horizon node"]:
    """The mean of all valid readings at the same time of the week, taken over training and validation rows.

    The rows end where the first test window starts. A time of the week without a valid reading takes the
    node's mean, and a node without any the mean over all nodes.

    Args:
        split: whose rows before the test part are averaged.
        windows: what is forecast; by default the test windows.
    """
    windows = split.test if windows is None else windows
    slots = _week_slots(split.traffic).to(windows.speed.device)
    fitted = split.test.first
    valid = windows.valid[:fitted].double()
    speed = windows.speed[:fitted].double() * valid
    nodes, slot_count = speed.shape[1], int(slots.max()) + 1
    sums = speed.new_zeros(slot_count, nodes).index_add(0, slots[:fitted], speed)
    counts = speed.new_zeros(slot_count, nodes).index_add(0, slots[:fitted], valid)
    overall = speed.sum() / valid.sum().clamp_min(1)
    of_node = torch.where(valid.sum(0) > 0, speed.sum(0) / valid.sum(0).clamp_min(1), overall)
    table = torch.where(counts > 0, sums / counts.clamp_min(1), of_node).float()
    ahead = torch.arange(1, windows.horizon + 1, device=table.device)
    return table[slots[windows.last_rows()[:, None] + ahead]]


def forecasts(split: Split) -> dict[str, Float32[Tensor, "window horizon node"]]:
    """All naive forecasts of the test windows by name."""
    return {
        "last value": last_value(split.test),
        "last non-zero value": last_nonzero(split.test),
        "historical average": historical_average(split),
    }


def _repeat(speed: Float32[Tensor, "window node"], horizon: int) -> Float32[Tensor, "window horizon node"]:
    """The same speed at every horizon, as a view."""
    return speed[:, None, :].expand(-1, horizon, -1)


def _week_slots(traffic: Traffic) -> Tensor:
    """Number of the time of the week of every row, from 0."""
    since = traffic.timestamps - traffic.timestamps.astype("datetime64[W]")
    return torch.from_numpy((since // traffic.step).astype("int64"))
