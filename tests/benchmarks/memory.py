"""Peak memory of long sequences, each in a process of its own."""

from __future__ import annotations

from typing import Any

from benchmarks import child
from benchmarks.tables import Cell, Findings, Table, Target

ABOUT = """One attention layer (D=64, H=4, one sample, float32). The peak is the largest resident memory of a
process that does only this; importing torch and the toolkit is part of it and stands in the first row. The seconds
are those of the one call, its first."""
GIB = 2**30

COLUMNS = {"what": "", "T": "", "peak": "B", "above rest": "B", "time": "s", "sink ratio": ""}


def run(length: int = 16_384, long: int = 1_000_000, rows: int = 256) -> Findings:
    """The map, and a few rows of a very long sequence."""
    table = Table("Peak memory and time of one call.", COLUMNS)
    table.rows.append(["imports only", None, child.run("nothing")["peak"], None, None, None])
    whole = child.run("map", length=length)
    summed = child.run("statistics", length=length)
    some = child.run("statistics", length=long, rows=rows)
    table.rows.append(_row("map", length, whole))
    table.rows.append(_row("statistics", length, summed))
    table.rows.append(_row(f"statistics of {rows} rows", long, some))
    return Findings(
        [table],
        [
            Target(f"peak of the T={length:,} map", whole.get("peak"), 3.0 * GIB, "B", note=whole.get("error", "")),
            Target(f"T={long:,} with {rows} rows: time", some.get("seconds"), 600.0, "s", note=some.get("error", "")),
        ],
    )


def run_long(length: int = 65_536) -> Findings:
    """The statistics of a long sequence."""
    found = child.run("statistics", length=length)
    table = Table("Peak memory and time of one call.", COLUMNS, [_row("statistics", length, found)])
    note = found.get("error", "")
    return Findings(
        [table], [Target(f"peak of the T={length:,} statistics", found.get("peak"), 2.0 * GIB, "B", note=note)]
    )


def _row(what: str, length: int, found: dict[str, Any]) -> list[Cell]:
    if "error" in found:
        return [what, length, f"fails: {found['error'][:90]}", None, None, None]
    return [what, length, found["peak"], found["above"], found["seconds"], found["sink"]]
