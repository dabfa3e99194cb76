"""Input sequences of any length, whose ends do not depend on the length: what a sweep over T measures on."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32, Int
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.traffic.data import Traffic
from sensitivity.traffic.scaler import Scaler
from sensitivity.traffic.windows import PARTS, borders, inputs


def sequences(
    traffic: Traffic,
    scaler: Scaler,
    length: int,
    samples: int,
    seed: int = 0,
    part: str = "test",
    *,
    longest: int | None = None,
    protocol: str = "dcrnn",
    input_length: int = 12,
    horizon: int = 12,
    day_of_week: bool = False,
) -> Float32[Tensor, "sample time node channel"]:
    """Draws model inputs of ``length`` rows that end at random times.

    The end times depend on everything but ``length``: sample n of one length ends when sample n of every other length
    does, and the shorter is the tail of the longer. A long sequence may begin before its part does; no target is read.

    Args:
        traffic: the series.
        scaler: of the inputs.
        length: rows of every sequence.
        samples: how many, with different end times.
        seed: of the draw, by a generator of its own.
        part: whose windows' last input rows are drawn from; ``all`` for any row.
        longest: the greatest length of a sweep; end times that lack so many rows before them are left out.
        protocol: of the split.
        input_length: of the split.
        horizon: of the split.
        day_of_week: adds the third input channel.

    Raises:
        InputError: a length below 1 or longer than the data, an unknown part, or fewer end times than samples.
    """
    longest = _check(traffic, length, longest, samples)
    ends = end_rows(traffic, samples, seed, part, longest, protocol, input_length, horizon)
    table = inputs(traffic, scaler, day_of_week)
    early = ends < length - 1
    if early.any():
        raise InputError(
            f"length {length} reaches back before the first row for {int(early.sum())} of {samples} sequences; pass "
            f"longest={length} to draw end times that fit every length."
        )
    return table[ends[:, None] + torch.arange(1 - length, 1)]


def end_rows(
    traffic: Traffic,
    samples: int,
    seed: int = 0,
    part: str = "test",
    longest: int = 1,
    protocol: str = "dcrnn",
    input_length: int = 12,
    horizon: int = 12,
) -> Int[Tensor, " sample"]:
    """The rows at which the sequences of :func:`sequences` end, in order of time."""
    rows = len(traffic.speed)
    if part not in PARTS:
        raise InputError(f"unknown part {part!r}; choose one of {', '.join(PARTS)}.")
    first, count = 0, rows
    if part != "all":
        start, count = getattr(borders(rows, protocol, input_length, horizon), part)
        first = start + input_length - 1
    lowest = max(first, longest - 1)
    available = first + count - lowest
    if available < samples:
        raise InputError(
            f"only {max(available, 0)} end times in the {part} part have {longest} rows before them, fewer than the "
            f"{samples} samples; ask for fewer samples, shorter lengths or part='all'."
        )
    draw = np.random.default_rng(seed).choice(available, size=samples, replace=False)
    return torch.from_numpy(np.sort(draw) + lowest)


def _check(traffic: Traffic, length: int, longest: int | None, samples: int) -> int:
    """The greatest length, or 1 if none is given."""
    named = {"length": length, "samples": samples} | ({} if longest is None else {"longest": longest})
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be an integer of at least 1, not {value!r}.")
    rows = len(traffic.speed)
    if max(length, longest or 1) > rows:
        raise InputError(f"length {max(length, longest or 1)} is longer than the data, which has {rows} rows.")
    if longest is not None and length > longest:
        raise InputError(f"length {length} exceeds longest={longest}; longest is the greatest length of the sweep.")
    return longest or 1
