"""The verdict table; it fits 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sensitivity.cli.verifying.compare import AGREEMENT, Comparison, Findings, Tally


def show(found: Findings, lines: Sequence[str], console: Console | None = None) -> None:
    """Prints the verdict on every bound, and what was assumed but does not hold."""
    console = console or Console(highlight=False)
    for line in lines:
        console.print(Text(line))
    if not math.isnan(found.disagreement):
        verdict = "agree" if found.disagreement <= AGREEMENT else "DISAGREE"
        console.print(
            Text(f"closed form and autodiff {verdict}: {found.disagreement:.1e} over {found.differentiated} blocks")
        )
    table = _table(("bound", "verdict", "violations", "blocks", "tightness", "closest"))
    for tally in found.bounds.values():
        table.add_row(*_row(tally))
    console.print(Text("\nBounds at all layers and lengths", style="bold"))
    console.print(table)
    console.print(Text("tightness: medians of measured / bound over layers and lengths; closest: largest", style="dim"))
    _notes(found, console)


def show_law(found: Sequence[Comparison], console: Console | None = None) -> None:
    """Prints the law beside what was measured."""
    console = console or Console(highlight=False)
    for one in found:
        heads = ("T", "measured", "law", "m / law", "limit", "m / limit", "diagonal", "law", "m / law")
        table = _table(heads)
        for place, length in enumerate(one.law.lengths):
            off, on = one.off_diagonal[place], one.diagonal[place]
            law, limit = float(one.law.off_diagonal[place]), float(one.law.asymptotic_off_diagonal[place])
            diagonal = float(one.law.diagonal[place])
            cells = (off, law, off / law, limit, off / limit, on, diagonal, on / diagonal)
            table.add_row(str(length), *map(_number, cells))
        console.print(Text(f"\nThe law of Gaussian tokens, {one.name}", style="bold"))
        console.print(table)
        for line in textwrap.wrap(
            f"root mean square Frobenius norm off the diagonal, mean norm on it; law: {one.law.method}; limit: large T "
            "(inf where the second moment diverges)", 80
        ):  # fmt: skip
            console.print(Text(line, style="dim"))


def _row(tally: Tally) -> tuple[str, ...]:
    if not tally.blocks:
        return tally.name, "does not apply", "-", "-", "-", "-"
    low, high = (
        _number(value) for value in (min(tally.tightness, default=math.nan), max(tally.tightness, default=math.nan))
    )
    return (
        tally.name,
        "violated" if tally.violations else "holds",
        str(tally.violations),
        str(tally.blocks),
        low if low == high else f"{low}...{high}",
        _number(tally.closest),
    )


def _notes(found: Findings, console: Console) -> None:
    """Why bounds do not apply, and which assumptions do not hold."""
    lines = [f"{tally.name}: {tally.reason}" for tally in found.bounds.values() if tally.reason and not tally.blocks]
    broken: dict[str, list[str]] = {}
    for tally in found.bounds.values():
        for text, value in tally.broken.items():
            broken.setdefault(f"does not hold: {text} {value:.3g}", []).append(tally.name)
    lines += [f"{text}; the reading of {', '.join(names)} rests on it" for text, names in broken.items()]
    for line in lines:
        for part in textwrap.wrap(line, 80, subsequent_indent="  "):
            console.print(Text(part, style="dim"))


def _table(heads: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    if abs(value) < 1e-3 or abs(value) >= 1e5:
        return f"{value:.1e}"
    return f"{value:.{min(4, max(0, 2 - math.floor(math.log10(abs(value)))))}f}"
