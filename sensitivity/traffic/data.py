"""Traffic: speeds on a road network over time, with the mask of valid readings as part of the data."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.traffic.index import check_index, usual_step

DAY = np.timedelta64(1, "D").astype("timedelta64[ns]")


@dataclass(frozen=True, eq=False)
class Traffic:
    """Speeds of a road network's sensors at regular times.

    Attributes:
        speed: ``(time, node)`` in miles per hour, as the file has them; a missing reading is 0.
        mask: ``(time, node)``, True where the raw value is a valid reading (neither 0 nor NaN).
        timestamps: ``(time,)`` datetime64[ns] of the local clock, regular but where summer time begins or ends.
        sensor_ids: one name per node.
        graph: ``(node, node)`` weights of the directed road graph (row: from, column: to), or None.
        name: what tables and figures call the data.
        source: the path, or ``synthetic(...)`` with every argument of the generator.
        origin: plain values from which :func:`sensitivity.traffic.reopen` gets the same data again.
        coordinates: ``(node, 2)`` positions (east, north; the synthetic city: miles), or None.
    """

    speed: Float32[Tensor, "time node"]
    mask: Bool[Tensor, "time node"]
    timestamps: np.ndarray
    sensor_ids: list[str]
    graph: Float32[Tensor, "node node"] | None = None
    name: str = "traffic"
    source: str = "memory"
    origin: dict[str, Any] = field(default_factory=dict)
    coordinates: Float[Tensor, "node 2"] | None = None

    @property
    def step(self) -> np.timedelta64:
        """Time between two rows, timedelta64[ns]."""
        return usual_step(self.timestamps)

    @property
    def steps_per_day(self) -> int:
        """Rows per day, rounded: 288 for five minutes."""
        return round(DAY / self.step)

    @property
    def missing(self) -> float:
        """Share of cells without a valid reading."""
        return 1.0 - float(self.mask.double().mean())

    def time_of_day(self) -> Float32[Tensor, " time"]:
        """Time of day in [0, 1): 0 at midnight."""
        since = self.timestamps - self.timestamps.astype("datetime64[D]")
        return torch.from_numpy((since / DAY).astype(np.float32))

    def day_of_week(self) -> Float32[Tensor, " time"]:
        """Day of the week in [0, 1): 0 on Monday, 6/7 on Sunday."""
        days = self.timestamps.astype("datetime64[D]").astype(np.int64)  # day 0, 1970-01-01, was a Thursday
        return torch.from_numpy(((days + 3) % 7 / 7).astype(np.float32))

    def channels(self, day_of_week: bool = False) -> Float32[Tensor, "time node channel"]:
        """Raw speed in mph, time of day, and on request day of week, side by side."""
        times = [self.time_of_day()] + ([self.day_of_week()] if day_of_week else [])
        return torch.stack([self.speed, *(t[:, None].expand_as(self.speed) for t in times)], dim=-1)

    def __repr__(self) -> str:
        rows, nodes = self.speed.shape
        graph = "no graph" if self.graph is None else f"{int((self.graph > 0).sum())} edges"
        minutes = self.step / np.timedelta64(1, "m")
        start, stop = (str(t.astype("datetime64[m]")).replace("T", " ") for t in self.timestamps[[0, -1]])
        return (
            f"Traffic({self.name}: {rows} steps of {minutes:g} min x {nodes} sensors, {start} to {stop}, "
            f"{100 * self.missing:.2f} % missing, {graph})"
        )


def assemble(values: np.ndarray, timestamps: np.ndarray, sensor_ids: list[str], source: str, **others: Any) -> Traffic:
    """Checks raw values and makes a :class:`Traffic` of them; NaN becomes 0 in ``speed`` and False in ``mask``.

    Raises:
        InputError: values that are no speeds (negative, infinite), no valid reading at all, or axes that disagree with
            the index or the ids.
    """
    if values.ndim != 2 or values.shape != (len(timestamps), len(sensor_ids)):
        raise InputError(
            f"{source} holds values of shape {values.shape}, but an index of {len(timestamps)} times and "
            f"{len(sensor_ids)} sensors; they must agree."
        )
    if len(set(sensor_ids)) < len(sensor_ids):
        twice = next(name for name in sensor_ids if sensor_ids.count(name) > 1)
        raise InputError(f"{source} names the sensor {twice!r} more than once; every column needs its own id.")
    _warn_of_clock(timestamps, check_index(timestamps, source).clock_changes, source)
    _check_speeds(values, timestamps, sensor_ids, source)
    mask = (values != 0) & ~np.isnan(values)
    if not mask.any():
        raise InputError(f"{source} has no valid reading: all {values.size} values are zero or NaN.")
    speed = np.where(mask, values, 0).astype(np.float32)
    return Traffic(
        torch.from_numpy(speed), torch.from_numpy(mask), timestamps.astype("datetime64[ns]"), sensor_ids,
        source=source, **others,
    )  # fmt: skip


def _warn_of_clock(timestamps: np.ndarray, rows: np.ndarray, source: str) -> None:
    """Says where the local clock was put forward or back."""
    for row in rows:
        before, after = timestamps[row - 1 : row + 1].astype("datetime64[m]")
        warnings.warn(
            f"the clock of {source} goes from {before} to {after}: taken as a change to or from summer time, so that "
            "these rows follow each other.",
            SensitivityWarning,
            stacklevel=4,
        )


def _check_speeds(values: np.ndarray, timestamps: np.ndarray, sensor_ids: list[str], source: str) -> None:
    """Refuses negative values, and infinite ones: also those that single precision takes for infinite."""
    for bad, kind in ((values < 0, "negative"), (values > np.finfo(np.float32).max, "infinite")):
        if bad.any():
            row, column = (int(part) for part in np.argwhere(bad)[0])
            when = timestamps[row].astype("datetime64[s]")
            raise InputError(
                f"{source} has {int(bad.sum())} {kind} speeds (the first is {values[row, column]:g} at "
                f"{when}, sensor {sensor_ids[column]}); write 0 where one is missing."
            )
