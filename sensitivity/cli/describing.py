"""What ``sensitivity data info`` prints, within 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sensitivity.traffic.summary import Gap, GraphSummary, Summary

WIDTH = 80
_LABEL = 10
_MINUTE, _HOUR, _DAY = (np.timedelta64(1, unit) for unit in ("m", "h", "D"))


def describe(found: Summary) -> str:
    """One screen of text."""
    lines = [*_file(found), *_times(found), *_values(found), *_missing(found), *_graph(found.graph)]
    if found.fault is None:
        lines.append(("splits", _splits(found)))
    text = [line for label, content in lines for line in _entry(label, content)]
    notes = [line for note in found.notes for line in _entry("note", note)]
    return "\n".join([*text, *_parts(found), *notes])


def _file(found: Summary) -> Iterator[tuple[str, str]]:
    yield "file", f"{found.path.name}, {found.size:,} bytes, {found.table.layout}"
    yield "sha256", found.sha256
    if found.published is None:
        yield "published", "no: none of the published files of METR-LA and PEMS-BAY"
    else:
        title, file = found.published
        yield "published", f"yes: {title}, {file.name} as served by {file.holder}"


def _times(found: Summary) -> Iterator[tuple[str, str]]:
    rows, sensors = found.table.values.shape
    yield "size", f"{rows:,} steps x {sensors:,} sensors"
    if found.index is None:
        yield "time", "no two times"
        return
    first, last = (_when(found.timestamps, row) for row in (0, -1))
    counted = "" if found.table.timestamps is not None else " (assumed: the file has no times)"
    zone = f", local clock of zone {found.table.zone}" if found.table.zone else ""
    yield "time", f"{first} to {last}, every {found.index.step / _MINUTE:g} min{zone}{counted}"
    yield "index", _regularity(found)
    names = "" if found.table.names is not None else " (counted: the file has no ids)"
    shown = ", ".join(found.ids[:4]) + (", ..." if len(found.ids) > 4 else "")
    yield "sensors", f"{shown}{names}"


def _regularity(found: Summary) -> str:
    index = found.index
    assert index is not None  # the caller looked
    kinds = [
        (len(index.repeated), "repeated"),
        (len(index.backward), "out of order"),
        (len(index.gaps), f"after a gap ({index.absent} steps left out)"),
        (len(index.uneven), "at uneven distances"),
    ]
    faults = [f"{count} {what}" for count, what in kinds if count]
    parts = [f"irregular, rows {', '.join(faults)}" if faults else "regular"]
    for row in index.clock_changes.tolist():
        parts.append(f"the clock goes from {_when(found.timestamps, row - 1)} to {_when(found.timestamps, row)}")
    return "; ".join(parts)


def _values(found: Summary) -> Iterator[tuple[str, str]]:
    unit = " mph" if found.published is not None else ""
    stated = "" if found.published is not None else "; the unit is not stated, mph is assumed"
    yield "values", f"{found.low:.4g} to {found.high:.4g}{unit}, mean {found.mean:.2f}{stated}"


def _missing(found: Summary) -> Iterator[tuple[str, str]]:
    cells = found.valid.size
    yield (
        "missing",
        f"{_percent(1 - found.valid.mean())} of all cells ({found.zeros:,} zeros and {found.nans:,} NaN of {cells:,})",
    )
    if found.gap is not None and found.gap.column is not None:
        yield "gap", f"longest at one sensor: {_run(found, found.gap)}, {found.ids[found.gap.column]}"
    if found.silence is not None:
        yield "silence", f"{found.silent:,} steps without any reading; longest: {_run(found, found.silence)}"
    yield "dead", _named(found.dead, "without any reading") + "; " + _named(found.stuck, "stuck at one value")


def _named(ids: list[str], what: str) -> str:
    if not ids:
        return f"no sensor {what}"
    shown = ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "")
    return f"{len(ids)} sensor{'s' * (len(ids) > 1)} {what} ({shown})"


def _graph(graph: GraphSummary | None) -> Iterator[tuple[str, str]]:
    if graph is None:
        yield "graph", "none given; --spatial distance would need one"
        return
    name = f"{graph.path.name}" + ("" if graph.published is None else f" as published for {graph.published[0]}")
    ids = (
        f"all sensors are among its {graph.nodes} ids" if graph.named else "without ids: the order of the data is taken"
    )
    yield "graph", f"{name}, {ids}"
    ways = f"not symmetric ({graph.one_way:,} one-way or unequal)" if graph.one_way else "symmetric"
    alone = f"{graph.alone} sensor{'s' * (graph.alone != 1)} alone"
    yield (
        "",
        (
            f"{graph.edges:,} edges ({graph.loops} self-loops), {ways}, weights {graph.low:.3g} to {graph.high:.3g}; "
            f"{alone}"
        ),
    )


def _splits(found: Summary) -> str:
    if found.parts:
        return "windows of 12 + 12 steps; missing: in the rows of their targets"
    return f"none: {len(found.valid)} steps are too few for windows of 12 + 12 steps in every part"


def _parts(found: Summary) -> Iterator[str]:
    """The table of the splits."""
    if not found.parts:
        return
    pad = " " * _LABEL
    yield f"{pad}{'':<12}{'train':>18}{'validation':>18}{'test':>18}"
    for protocol in dict.fromkeys(part.protocol for part in found.parts):
        cells = (f"{p.windows:,} {_percent(p.missing):>7}" for p in found.parts if p.protocol == protocol)
        yield f"{pad}{protocol:<12}" + "".join(f"{cell:>18}" for cell in cells)


def _run(found: Summary, gap: Gap) -> str:
    steps = f"{gap.length:,} step{'s' * (gap.length > 1)}"
    if found.index is None:
        return steps
    return f"{steps} ({_span(gap.length * found.index.step)}) from {_when(found.timestamps, gap.row)}"


def _percent(share: float) -> str:
    """In per cent with two decimals; with one digit where these would hide that there is something."""
    return f"{100 * share:.1g} %" if 0 < 100 * share < 0.005 else f"{100 * share:.2f} %"


def _span(time: np.timedelta64) -> str:
    for unit, name in ((_DAY, "days"), (_HOUR, "h")):
        if time >= 2 * unit:
            return f"{time / unit:.3g} {name}"
    return f"{time / _MINUTE:g} min"


def _when(times: np.ndarray, row: int) -> str:
    return str(times[row].astype("datetime64[m]")).replace("T", " ")


def _entry(label: str, content: str) -> list[str]:
    """A label and its text, wrapped behind the label."""
    return textwrap.wrap(
        content, WIDTH, initial_indent=label.ljust(_LABEL), subsequent_indent=" " * _LABEL, break_on_hyphens=False
    )
