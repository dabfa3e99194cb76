"""What a section of the benchmarks found: tables of numbers with units, and targets that are met or not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

Cell = float | int | str | None


@dataclass(frozen=True)
class Table:
    """Numbers by row.

    Attributes:
        caption: one sentence.
        columns: name to unit: ``s``, ``x`` (a ratio), ``B`` (bytes), ``e`` (an error), ``1/s``, or empty for a count or
            a text.
        rows: one cell per column; a text stands as it is, None is a dash.
    """

    caption: str
    columns: dict[str, str]
    rows: list[list[Cell]] = field(default_factory=list)

    def markdown(self) -> str:
        """The table; numbers to the right."""
        numeric = [any(not isinstance(row[at], str | None) for row in self.rows) for at in range(len(self.columns))]
        lines = [f"| {' | '.join(self.columns)} |", f"|{'|'.join('---:' if right else '---' for right in numeric)}|"]
        for row in self.rows:
            cells = [shown(cell, unit) for cell, unit in zip(row, self.columns.values(), strict=True)]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join([f"*{self.caption}*", "", *lines])


@dataclass(frozen=True)
class Target:
    """What was to be shown.

    Attributes:
        what: in words.
        value: what was measured; None where it could not be.
        limit: what it is held to.
        unit: as in :class:`Table`.
        least: whether the limit is the least that is wanted, not the most.
        note: why there is no value, or how it was got.
    """

    what: str
    value: float | None
    limit: float
    unit: str = "x"
    least: bool = False
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the value keeps to the limit; a missing one does not."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.least else self.value <= self.limit

    def row(self) -> str:
        """A line of the table of targets."""
        wanted = f"at {'least' if self.least else 'most'} {shown(self.limit, self.unit)}"
        found = shown(self.value, self.unit) + (f" ({self.note})" if self.note else "")
        return f"| {self.what} | {wanted} | {found} | {'yes' if self.met else '**no**'} |"


@dataclass(frozen=True)
class Findings:
    """All that a section hands back.

    Attributes:
        tables: in the order of the page.
        targets: in the order of the page.
        data: numbers that figures and paragraphs are made from.
    """

    tables: list[Table]
    targets: list[Target] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Findings:
        """From what :meth:`plain` gave."""
        tables = [Table(**table) for table in plain["tables"]]
        return cls(tables, [Target(**target) for target in plain["targets"]], plain["data"])


def shown(value: Cell, unit: str = "") -> str:
    """A cell as it is read."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if unit == "s":
        return duration(value)
    if unit == "B":
        return size(value)
    if unit == "e":
        return f"{value:.1e}"
    suffix = {"x": "x", "1/s": " per second"}.get(unit, "")
    return f"{number(value)}{suffix}"


def number(value: float | int) -> str:
    """Three digits, thousands set apart; counts in full."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{round(value):,}" if abs(value) >= 100 else f"{value:.3g}"


def duration(value: float) -> str:
    """Seconds in a unit that fits."""
    for unit, scale, limit in (("µs", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0)):
        if abs(value) < limit:
            return f"{number(float(value / scale))} {unit}"
    return f"{number(float(value / 3600))} h"


def size(value: float) -> str:
    """Bytes in a unit that fits."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{number(float(value / scale))} {unit}"
    return f"{round(value)} B"
