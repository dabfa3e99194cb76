"""Windows over traffic: inputs and targets under the two protocols of the literature."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Int
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.traffic.data import Traffic
from sensitivity.traffic.scaler import Scaler

PROTOCOLS = ("dcrnn", "paper")
PARTS = ("train", "validation", "test", "all")


class Window(NamedTuple):
    """One window, or a batch of them with a leading axis.

    Attributes:
        inputs: ``(time, node, channel)``: z-scored speed, time of day in [0, 1), optionally day of week in [0, 1).
        target: ``(horizon, node)`` raw speed in mph, 0 where the reading is missing.
        mask: ``(horizon, node)``, True where the target is a valid reading.
    """

    inputs: Float32[Tensor, "*batch time node channel"]
    target: Float32[Tensor, "*batch horizon node"]
    mask: Bool[Tensor, "*batch horizon node"]


class Borders(NamedTuple):
    """Where the parts of a split lie: ``(first, count)`` says that windows start at rows first ... first + count - 1.

    Attributes:
        train: training windows.
        validation: validation windows.
        test: test windows.
        fitted: the scaler is fitted on rows 0 ... fitted - 1.
    """

    train: tuple[int, int]
    validation: tuple[int, int]
    test: tuple[int, int]
    fitted: int


@dataclass(frozen=True, eq=False)
class Windows:
    """Consecutive windows of stride 1 over shared tables; a window is a view, nothing is copied.

    Attributes:
        table: ``(time, node, channel)`` inputs of the whole series, already scaled.
        speed: ``(time, node)`` raw speeds of the whole series in mph.
        valid: ``(time, node)`` the mask of the whole series.
        first: row at which window 0 starts.
        count: number of windows.
        input_length: rows of input in a window.
        horizon: rows of target, right behind the input.
    """

    table: Float32[Tensor, "time node channel"]
    speed: Float32[Tensor, "time node"]
    valid: Bool[Tensor, "time node"]
    first: int
    count: int
    input_length: int
    horizon: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Window:
        """Window ``index`` (negative counts from the end), as views."""
        if not -self.count <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        start = self.first + index % self.count
        split, stop = start + self.input_length, start + self.input_length + self.horizon
        return Window(self.table[start:split], self.speed[split:stop], self.valid[split:stop])

    def __iter__(self) -> Iterator[Window]:
        return (self[index] for index in range(self.count))

    def batch(self, indices: Int[Tensor, " batch"] | list[int] | range) -> Window:
        """The windows at ``indices`` (0 ... count - 1) with a leading batch axis, gathered in one go."""
        starts = torch.as_tensor(indices) + self.first
        if starts.numel() and not self.first <= int(starts.min()) <= int(starts.max()) < self.first + self.count:
            raise IndexError(f"window indices must lie in 0 ... {self.count - 1}")
        starts = starts.to(self.table.device)
        rows = starts[:, None] + torch.arange(self.input_length, device=starts.device)
        ahead = starts[:, None] + self.input_length + torch.arange(self.horizon, device=starts.device)
        return Window(self.table[rows], self.speed[ahead], self.valid[ahead])

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[Window]:
        """All windows in batches of ``size``, the last one smaller; shuffled if a (CPU) ``generator`` is given."""
        order = torch.arange(self.count) if generator is None else torch.randperm(self.count, generator=generator)
        return (self.batch(chunk) for chunk in order.split(size))

    def last_rows(self) -> Int[Tensor, " window"]:
        """Row of the last input of every window."""
        return torch.arange(self.count, device=self.table.device) + self.first + self.input_length - 1

    def to(self, device: torch.device | str) -> Windows:
        """The same windows with their tables on another device."""
        return dataclasses.replace(
            self, table=self.table.to(device), speed=self.speed.to(device), valid=self.valid.to(device)
        )


@dataclass(frozen=True, eq=False)
class Split:
    """Training, validation and test windows of one series, and the scaler of their inputs."""

    train: Windows
    validation: Windows
    test: Windows
    scaler: Scaler
    protocol: str
    traffic: Traffic

    def to(self, device: torch.device | str) -> Split:
        """The same split with its tables on another device; the three parts go on sharing them."""
        train = self.train.to(device)
        validation, test = (
            dataclasses.replace(train, first=part.first, count=part.count) for part in (self.validation, self.test)
        )
        return dataclasses.replace(self, train=train, validation=validation, test=test)


def borders(rows: int, protocol: str = "dcrnn", input_length: int = 12, horizon: int = 12) -> Borders:
    """Where the parts lie among ``rows`` rows.

    ``dcrnn``: all ``S = rows - input_length - horizon + 1`` windows first; the first round(0.7 S) train, the last
    round(0.2 S) test, the rest validate; windows cross the borders. ``fitted`` counts the rows that are inputs of
    training windows, so that no target of validation or test is among them.

    ``paper``: rows first: int(0.7 rows), int(0.1 rows), int(0.2 rows), what is left over unused; then the windows that
    lie inside each block. ``fitted`` is the first block.

    Raises:
        InputError: unknown protocol, lengths below 1, or a part without a window.
    """
    if protocol not in PROTOCOLS:
        raise InputError(f"unknown protocol {protocol!r}; choose one of {', '.join(PROTOCOLS)}.")
    for name, value in (("input_length", input_length), ("horizon", horizon)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be an integer of at least 1, not {value!r}.")
    span = input_length + horizon - 1
    if protocol == "dcrnn":
        windows = rows - span
        train, test = round(0.7 * windows), round(0.2 * windows)
        validation = windows - train - test
        parts = (0, train), (train, validation), (train + validation, test)
        fitted = train + input_length - 1
    else:
        fitted, middle, last = int(0.7 * rows), int(0.1 * rows), int(0.2 * rows)
        parts = (0, fitted - span), (fitted, middle - span), (fitted + middle, last - span)
    for name, (_, count) in zip(("train", "validation", "test"), parts, strict=True):
        if count < 1:
            raise InputError(
                f"{rows} rows are too few for the {protocol!r} split: the {name} part would hold no window of "
                f"{input_length} + {horizon} rows; use longer data or shorter windows."
            )
    return Borders(*parts, fitted)


def split(
    traffic: Traffic,
    protocol: str = "dcrnn",
    input_length: int = 12,
    horizon: int = 12,
    *,
    per_sensor: bool | None = None,
    zeros: bool | None = None,
    day_of_week: bool = False,
) -> Split:
    """Cuts traffic into training, validation and test windows, and scales the inputs.

    Args:
        traffic: the series.
        protocol: ``dcrnn`` (the literature's) or ``paper``; :func:`borders` spells both out.
        input_length: rows of input.
        horizon: rows to forecast.
        per_sensor: one scaler for each sensor; by default only under ``paper``.
        zeros: count missing readings in the scaler, as published code does; by default only under ``paper``.
        day_of_week: adds the third input channel.

    Raises:
        InputError: see :func:`borders`; or a part whose targets hold no valid reading.
    """
    parts = borders(len(traffic.speed), protocol, input_length, horizon)
    _check_targets(traffic, parts, protocol, input_length, horizon)
    published = protocol == "paper"
    scaler = Scaler.fit(
        traffic.speed[: parts.fitted],
        traffic.mask[: parts.fitted],
        published if per_sensor is None else per_sensor,
        published if zeros is None else zeros,
    )
    table = inputs(traffic, scaler, day_of_week)
    train, validation, test = (
        Windows(table, traffic.speed, traffic.mask, first, count, input_length, horizon)
        for first, count in (parts.train, parts.validation, parts.test)
    )
    return Split(train, validation, test, scaler, protocol, traffic)


def target_rows(part: tuple[int, int], input_length: int, horizon: int) -> slice:
    """The rows in which the targets of a part's windows lie."""
    first, count = part
    return slice(first + input_length, first + input_length + count + horizon - 1)


def _check_targets(traffic: Traffic, parts: Borders, protocol: str, input_length: int, horizon: int) -> None:
    """Refuses a split of which one part could not be scored."""
    for name, part in zip(PARTS, (parts.train, parts.validation, parts.test), strict=False):
        rows = target_rows(part, input_length, horizon)
        if not traffic.mask[rows].any():
            first, last = traffic.timestamps[[rows.start, rows.stop - 1]].astype("datetime64[m]")
            raise InputError(
                f"{traffic.name} has no valid reading from {first} to {last}, where the targets of the {name} part of "
                f"the {protocol!r} split lie; cut the data to where there are readings."
            )


def inputs(traffic: Traffic, scaler: Scaler, day_of_week: bool = False) -> Float32[Tensor, "time node channel"]:
    """The whole series as model inputs: z-scored speed, time of day, and on request day of week.

    Raises:
        InputError: a scaler per sensor that was fitted on another number of sensors.
    """
    nodes = traffic.speed.shape[1]
    if scaler.mean.ndim and scaler.mean.shape[0] != nodes:
        raise InputError(f"the scaler was fitted on {scaler.mean.shape[0]} sensors, but the data has {nodes}.")
    table = traffic.channels(day_of_week)
    table[..., 0] = scaler.transform(traffic.speed)
    return table
