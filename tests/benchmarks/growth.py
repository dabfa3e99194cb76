"""How time and memory grow with every size, with fitted exponents."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from benchmarks import child
from benchmarks.series import SERIES, Series
from benchmarks.tables import Cell, Findings, Table, size
from benchmarks.timing import interleaved, median
from sensitivity.fit import Decay, decay_exponent

ABOUT = """Time and memory grow as a power of each size; the exponents are fitted by the toolkit's own
[`sensitivity.fit`](generated/api/sensitivity.fit.md), over four sizes, with an interval from resampling rounds.
Map, statistics and forward pass are those of one attention layer; the generic engine differentiates a stack of
attention layers. Memory is what a process of its own holds at its peak beyond what it held at rest: a few MiB of it
are tiles of a fixed size, so that short sequences show less growth than long ones. The attention weights
of all heads, another $4 H T^2$ bytes beside the $4 T^2$ of the map, are computed when somebody asks for them."""


def run(names: Collection[str] = tuple(SERIES), shrink: int = 1, rounds: int = 5) -> Findings:
    """Times all sizes of a series in turns, and measures their memory in a process per series.

    Args:
        names: of :data:`SERIES`.
        shrink: divides every size along T, for a quick look.
        rounds: readings of each.
    """
    times = Table(f"Time: medians of {rounds} rounds.", _columns("time", "s"))
    held = Table("Peak memory above rest: one process for a series.", _columns("memory", "B"))
    data: dict[str, Any] = {}
    for name in names:
        series = SERIES[name]
        values = _shrunk(series, series.values, shrink)
        found = interleaved({str(value): series.job(value) for value in values}, rounds)
        readings = [list(round_) for round_ in zip(*found.values(), strict=True)]
        law, middle = growth(values, readings), [median(some) for some in found.values()]
        times.rows.append(_row(series, values, middle, law))
        data[name] = {"axis": series.axis, "values": values, "times": middle, "law": _plain(law)}
        sizes = _shrunk(series, series.held or series.values, shrink)
        memory = child.run("series", name=name, values=sizes)
        if "error" in memory:
            held.rows.append([series.what, series.axis, series.fixed, f"fails: {memory['error']}", *[None] * 4])
            continue
        law = growth(sizes, [memory["above"]])
        held.rows.append(_row(series, sizes, memory["above"], law))
        data[name] |= {"sizes": sizes, "memory": memory["above"], "memory law": _plain(law)}
    return Findings([times, held], data=data)


def _columns(what: str, unit: str) -> dict[str, str]:
    ends = {"smallest": "", what: unit, "largest": "", f"its {what}": unit}
    return {"what": "", "over": "", "fixed": ""} | ends | {"exponent": ""}


def _shrunk(series: Series, values: Sequence[int], shrink: int) -> list[int]:
    return [value // shrink if series.axis == "T" else value for value in values]


def growth(values: Sequence[int], readings: Sequence[Sequence[float]]) -> Decay:
    """A power law through readings ``(round, value)``; its exponent is minus the decay's."""
    law = decay_exponent(values, readings)
    if law is None:
        raise ValueError(f"no power law through {list(values)}")
    return law


def in_words(law: Decay) -> str:
    """The exponent of growth with its interval."""
    low, high = -law.interval[1], -law.interval[0]
    return f"{-law.exponent:.2f}" if math.isnan(low) else f"{-law.exponent:.2f} ({low:.2f} to {high:.2f})"


def _row(series: Series, values: Sequence[int], middle: Sequence[float], law: Decay) -> list[Cell]:
    return [
        series.what, series.axis, series.fixed, values[0], middle[0], values[-1], middle[-1], in_words(law)
    ]  # fmt: skip


def _plain(law: Decay) -> dict[str, float]:
    return {"exponent": -law.exponent, "intercept": law.intercept, "r_squared": law.r_squared}


REACH = {
    "map over T": "The map of one layer",
    "statistics over T": "Its statistics without the map",
    "generic over T": "The generic engine (depth 2, D=32)",
}


def afford(data: dict[str, Any]) -> str:
    """What a user can afford: lengths for a second, a minute and an hour."""
    lines = ["### What you can afford", ""]
    for name, what in REACH.items():
        if name in data:
            second, minute, hour = (_rounded(longest(data[name], budget)) for budget in (1.0, 60.0, 3600.0))
            reach = f"- **{what}**: a second reaches T={second:,}, a minute T={minute:,}, an hour T={hour:,}"
            lines.append(f"{reach}{_need(name, data[name], minute)}.")
    seen = max((max(entry["values"]) for entry in data.values() if entry["axis"] == "T"), default=0)
    beyond = f"Lengths beyond those that were timed (at most T={seen:,}) go on from the longest"
    lines += ["", f"{beyond} at the growth of the last step, or with T² if that is more.", _doubling(data)]
    return "\n".join(lines)


def _need(name: str, entry: dict[str, Any], length: int) -> str:
    """The memory of a length."""
    if name == "map over T":
        return f"; the map alone takes $4 T^2$ bytes, {size(4.0 * length**2)} at the minute's length"
    if "memory law" in entry:
        return f"; the minute's length holds about {size(value_at(entry['memory law'], length))}"
    return ""


def _doubling(data: dict[str, Any]) -> str:
    """What twice the width, the depth and the samples cost the generic engine."""
    axes = {"generic over D": "width", "generic over depth": "depth", "generic over samples": "samples"}
    parts = [
        f"{2 ** data[name]['law']['exponent']:.1f} for twice the {axis}" for name, axis in axes.items() if name in data
    ]
    return f"Factors on the generic engine's time: {', '.join(parts)}." if parts else ""


def longest(entry: dict[str, Any], budget: float) -> float:
    """The length that takes ``budget`` seconds: between those that were timed, or beyond them.

    A law that is fitted to all lengths grows too slowly beyond them, as the short ones are mostly overhead.
    """
    values, times = entry["values"], entry["times"]
    place = min(max(sum(time <= budget for time in times), 1), len(times) - 1)
    steepness = math.log(times[place] / times[place - 1]) / math.log(values[place] / values[place - 1])
    if budget > times[-1]:
        steepness = max(steepness, 2.0)
    near = place if budget > times[-1] else place - 1
    return float(values[near] * (budget / times[near]) ** (1 / steepness)) if steepness > 0 else math.inf


def value_at(law: dict[str, float], value: float) -> float:
    """What a law of growth predicts at a size."""
    return math.exp(min(law["intercept"] + law["exponent"] * math.log(value), 100.0))


def _rounded(value: float) -> int:
    """Two digits."""
    value = min(value, 1e40)
    digits = max(0, int(math.log10(max(value, 1))) - 1)
    return round(value / 10**digits) * 10**digits
