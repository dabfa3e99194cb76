"""How a measurement reads, in a terminal and in a notebook."""

from __future__ import annotations

import html as markup
import textwrap
from typing import TYPE_CHECKING

from sensitivity.errors import InputError

if TYPE_CHECKING:
    from sensitivity.result.measurement import Measurement
    from sensitivity.statistics import RowStatistics

WIDTH = 80


def plain(found: Measurement) -> str:
    """A headline and one line per statistic, 80 columns at most."""
    title, lines = _lines(found)
    rows = [f"  {label:<19} {value}" for label, value in lines]
    return "\n".join(row if len(row) <= WIDTH else row[: WIDTH - 3] + "..." for row in [title, *rows])


def html(found: Measurement) -> str:
    """The same as a table; whatever the map was named is escaped."""
    title, lines = _lines(found)
    cells = "".join(
        f"<tr><th style='text-align:left'>{markup.escape(label)}</th>"
        f"<td style='text-align:left'>{markup.escape(value)}</td></tr>"
        for label, value in lines
    )
    return f"<div><b>{markup.escape(title)}</b><table>{cells}</table></div>"


def _lines(found: Measurement) -> tuple[str, list[tuple[str, str]]]:
    name = f" {textwrap.shorten(found.name, 30, placeholder='...')!r}" if found.name else ""
    length = f"T={found.length}" if found.square else f"{found.length} queries x {found.keys} keys"
    rows = len(found.query_times)
    width = f", D={found.in_dim}" if found.in_dim else ""
    if found.in_dim and found.out_dim and found.out_dim != found.in_dim:
        width = f", D={found.in_dim} to {found.out_dim}"
    samples = f"{found.samples} sample{'s' if found.samples != 1 else ''}"
    lines = [("engine", found.engine)] if found.engine else []
    if rows < found.length:
        lines.append(("query rows", f"{rows} of {found.length}"))
    sums = found.sums()
    lines += _map_lines(found, sums) + _attention_lines(found)
    if found.path_names:
        lines.append(("paths", ", ".join(found.path_names)))
    pairs = found.samples * rows * found.keys
    hidden = pairs - sums.visible_pairs()
    if hidden:
        lines.append(("left out", f"{hidden} of {pairs} pairs (causally hidden or padded)"))
    lines += [("note", note) for note in found.notes]
    return f"{found.kind}{name}: {samples}, {length}{width}, {found.norm} norm", lines


def _map_lines(found: Measurement, sums: RowStatistics) -> list[tuple[str, str]]:
    if not found.square:
        return []
    lines = []
    for label, finish in (("sink ratio", sums.sink_ratio), ("parroting index", sums.parroting_index)):
        raw = finish(False)
        value = f"{raw:.4g} raw"
        null = f"{raw.null:.4g}"
        if found.has_removed:
            value += f", {finish(True):.4g} residual removed"
        lines.append((label, f"{value} (uniform: {null})" if not raw.note else f"undefined: {raw.note}"))
    return lines


def _attention_lines(found: Measurement) -> list[tuple[str, str]]:
    if not found.has_attention or not found.square:
        return []
    try:
        mass = found.diagonal_attention()
    except InputError as error:
        return [("diagonal attention", f"undefined: {error}")]
    return [("diagonal attention", f"{mass:.4g} (uniform: {mass.null:.4g})")]
