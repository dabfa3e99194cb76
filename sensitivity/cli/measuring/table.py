"""The tables at the end of a measurement; they fit 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sensitivity.fit import MINIMUM_LENGTHS, Decay
from sensitivity.statistics import Statistic
from sensitivity.sweep import Sweep, Verdict

NAME = 17
_EXCHANGEABLE = "tokens are exchangeable"
_SENSITIVITY = (
    "off_diagonal",
    "diagonal",
    "diagonal_residual_removed",
    "sink_ratio",
    "sink_ratio_residual_removed",
)


def show(found: Sweep, lines: Sequence[str], console: Console | None = None) -> None:
    """Prints what was measured: sensitivity, paths, decay and bounds."""
    console = console or Console(highlight=False)
    for line in lines:
        console.print(Text(line))
    names = short_names(found.layers)
    if any(names[layer] != layer for layer in found.layers):
        first = found.layers[0]
        console.print(Text(f"layers are named by what tells them apart: {names[first]} is {first}"))
    _sensitivity(found, names, console)
    _paths(found, names, console)
    if len(found.lengths) >= MINIMUM_LENGTHS:
        _decay(found, names, console)
    else:
        console.print(Text(f"\nNo decay exponents: they need at least {MINIMUM_LENGTHS} lengths."))
    if any(record.bounds for record in found.records.values()):
        _bounds(found, console)
    console.print()


def _sensitivity(found: Sweep, names: dict[str, str], console: Console) -> None:
    """Sensitivity, sinks and parroting at the longest length."""
    heads = ("layer", "off", "diag", "diag-I", "sink", "sink-I", "parrot", "null", "a_ii", "null")
    table = _table(heads)
    for layer in found.layers:
        one = found.record(layer).statistics
        parrot, mass = one["parroting_index"], one["diagonal_attention"]
        values = [one.get(name) for name in _SENSITIVITY]
        table.add_row(names[layer], *map(_number, [*values, parrot, parrot.null, mass, mass.null]))
    _print(
        console,
        f"Sensitivity at T={found.lengths[-1]}",
        table,
        f"mean {found.norm} norms of dh_i/dx_j off and on the diagonal (-I: without residual)",
        "sink: on / off; parrot: share of i itself in row i; a_ii: attention to itself",
    )


def _paths(found: Sweep, names: dict[str, str], console: Console) -> None:
    """Shares of the paths off and on the diagonal at the longest length, and what attention looks like."""
    heads = (
        "\nlayer",
        "off\nvalue",
        "\nkey",
        "diag\nresid",
        "\nvalue",
        "\nkey",
        "\nquery",
        "key\nsink",
        "row\nentropy",
    )
    table = _table(heads)
    for layer in found.layers:
        one = found.record(layer).statistics
        off = _shares([one[f"off_diagonal_{name}"] for name in ("value", "key")])
        on = _shares([one[f"diagonal_{name}"] for name in ("residual", "value", "key", "query")])
        table.add_row(names[layer], *off, *on, _number(one["key_sink"]), _number(one["row_entropy"]))
    _print(
        console,
        f"Paths and attention at T={found.lengths[-1]}",
        table,
        "shares of the paths' norms; key sink: largest mean weight of one key",
    )


def _decay(found: Sweep, names: dict[str, str], console: Console) -> None:
    """Fitted exponents of T^-b: over all lengths, over the longest ones, and on the diagonal."""
    longest = found.lengths[-MINIMUM_LENGTHS:]
    heads = ["layer", "off b", "95 %", "diag b", "95 %", "diag-I"]
    if longest != found.lengths:
        heads[3:3] = [f"T>={longest[0]}", "95 %"]
    table = _table(heads)
    for layer in found.layers:
        cells = [*_fit(found.decay(layer))]
        if longest != found.lengths:
            cells += _fit(found.decay(layer, lengths=longest))
        cells += _fit(found.decay(layer, "diagonal"))
        table.add_row(names[layer], *cells, _fit(found.decay(layer, "diagonal_residual_removed"))[0])
    _print(
        console,
        f"Decay as T^-b over T={found.lengths[0]}...{found.lengths[-1]}",
        table,
        "theory: b tends to 1 off the diagonal, to 0 on it, once T exceeds the",
        "variability of exp(logits); 95 %: interval from resampling",
    )


def _bounds(found: Sweep, console: Console) -> None:
    """Every bound over all layers and lengths."""
    table = _table(("bound", "violations", "blocks", "tightness", "closest call"))
    every, marked = list(found.records.values()), False
    for name in dict.fromkeys(name for record in every for name in record.bounds):
        applied = [r for r in every if name in r.bounds and r.bounds[name].applies]
        if not applied:
            table.add_row(name, "-", "0", "does not apply", "-")
            continue
        longest = max(record.length for record in applied)
        verdicts = [record.bounds[name] for record in applied]
        mark = " *" if _in_order(verdicts) else ""
        marked |= bool(mark)
        table.add_row(
            f"{name}{mark}" if longest == found.lengths[-1] else f"{name}{mark} (T<={longest})",
            str(sum(verdict.violations for verdict in verdicts)),
            str(sum(verdict.blocks for verdict in verdicts)),
            _range([record.bounds[name].tightness for record in applied if record.length == longest]),
            _number(max(verdict.closest for verdict in verdicts)),
        )
    _print(
        console,
        "Bounds, checked at all layers and lengths",
        table,
        "tightness: median of measured / bound at the longest T; closest call: largest",
        *([_ORDERED] if marked else []),
    )


_ORDERED = "*: its mean is over exchangeable tokens; a permutation test finds an order"


def _in_order(verdicts: Sequence[Verdict]) -> bool:
    """Whether most checks of a bound that assumes exchangeable tokens find an order in them; one may by chance."""
    tests = [held for v in verdicts for text, (held, _) in v.assumptions.items() if text.startswith(_EXCHANGEABLE)]
    return 2 * sum(not held for held in tests) > len(tests)


def short_names(layers: Sequence[str]) -> dict[str, str]:
    """Names that fit a column: whole, or without the parts that all have in common, or cut in the middle."""
    if max(map(len, layers)) <= NAME:
        return {layer: layer for layer in layers}
    parts = [layer.split(".") for layer in layers]
    shortest = min(map(len, parts))
    first = next((i for i in range(shortest) if len({tuple(p[: i + 1]) for p in parts}) > 1), 0)
    last = next((i for i in range(shortest) if len({tuple(p[len(p) - i - 1 :]) for p in parts}) > 1), 0)
    kept = {layer: ".".join(part[first : len(part) - last]) for layer, part in zip(layers, parts, strict=True)}
    if len(set(kept.values())) < len(layers) or not all(kept.values()):
        kept = {layer: layer for layer in layers}
    return {layer: _cut(name) for layer, name in kept.items()}


def _cut(name: str) -> str:
    return name if len(name) <= NAME else f"{name[: NAME // 2 - 2]}...{name[-(NAME // 2 - 1) :]}"


def _table(heads: Sequence[str]) -> Table:
    gap = 1 if len(heads) > 7 else 2
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def _print(console: Console, title: str, table: Table, *captions: str) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    console.print(table)
    for caption in captions:
        console.print(Text(caption, style="dim"))


def _number(value: float | Statistic | None) -> str:
    """Up to three significant digits, in at most six characters."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0 or math.isinf(value):
        return f"{float(value):g}"
    if abs(value) < 1e-3 or abs(value) >= 1e5:
        return f"{float(value):.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{float(value):.{min(4, max(0, 2 - math.floor(math.log10(abs(value)))))}f}"


def _fit(fit: Decay | None) -> tuple[str, str]:
    if fit is None:
        return "-", "-"
    low, high = (round(value, 2) + 0.0 for value in fit.interval)
    return f"{round(fit.exponent, 2) + 0.0:.2f}", "-" if math.isnan(low) else f"{low:.2f} {high:.2f}"


def _shares(values: Sequence[float]) -> list[str]:
    total = math.fsum(values)
    return [f"{100 * value / total:.0f}%" if total > 0 else "-" for value in values]


def _range(values: Sequence[float]) -> str:
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return "-"
    low, high = _number(known[0]), _number(known[-1])
    return low if low == high else f"{low} to {high}"
