"""How a sensitivity map reads, in a terminal and in a notebook."""

from __future__ import annotations

import html as markup
import textwrap
from typing import TYPE_CHECKING

from sensitivity.errors import InputError

if TYPE_CHECKING:
    from sensitivity.result.map import SensitivityMap

WIDTH = 80


def plain(found: SensitivityMap) -> str:
    """A headline and one line per statistic, 80 columns at most."""
    title, lines = _lines(found)
    rows = [f"  {label:<19} {value}" for label, value in lines]
    return "\n".join(row if len(row) <= WIDTH else row[: WIDTH - 3] + "..." for row in [title, *rows])


def html(found: SensitivityMap) -> str:
    """The same as a table; whatever the map was named is escaped."""
    title, lines = _lines(found)
    cells = "".join(
        f"<tr><th style='text-align:left'>{markup.escape(label)}</th>"
        f"<td style='text-align:left'>{markup.escape(value)}</td></tr>"
        for label, value in lines
    )
    return f"<div><b>{markup.escape(title)}</b><table>{cells}</table></div>"


def _lines(found: SensitivityMap) -> tuple[str, list[tuple[str, str]]]:
    name = f" {textwrap.shorten(found.name, 30, placeholder='...')!r}" if found.name else ""
    queries, keys = found.norms.shape[1:]
    length = f"T={queries}" if found.square else f"{queries} queries x {keys} keys"
    width = f", D={found.in_dim}" if found.in_dim else ""
    if found.in_dim and found.out_dim and found.out_dim != found.in_dim:
        width = f", D={found.in_dim} to {found.out_dim}"
    samples = f"{found.samples} sample{'s' if found.samples != 1 else ''}"
    lines = [("engine", found.engine)] if found.engine else []
    lines += _map_lines(found) + _attention_lines(found)
    if found.paths:
        lines.append(("paths", ", ".join(found.paths)))
    hidden = int((~found.visible).sum())
    if hidden:
        lines.append(("left out", f"{hidden} of {found.visible.numel()} pairs (causally hidden or padded)"))
    lines += [("note", note) for note in found.notes]
    return f"SensitivityMap{name}: {samples}, {length}{width}, {found.norm} norm", lines


def _map_lines(found: SensitivityMap) -> list[tuple[str, str]]:
    if not found.square:
        return []
    sums = found.sums()
    lines = []
    for label, finish in (("sink ratio", sums.sink_ratio), ("parroting index", sums.parroting_index)):
        raw = finish(False)
        value = f"{raw:.4g} raw"
        null = f"{raw.null:.4g}"
        if found.diagonal is not None:
            value += f", {finish(True):.4g} residual removed"
        lines.append((label, f"{value} (uniform: {null})" if not raw.note else f"undefined: {raw.note}"))
    return lines


def _attention_lines(found: SensitivityMap) -> list[tuple[str, str]]:
    if found.attention is None or not found.square:
        return []
    try:
        mass = found.diagonal_attention()
    except InputError as error:
        return [("diagonal attention", f"undefined: {error}")]
    return [("diagonal attention", f"{mass:.4g} (uniform: {mass.null:.4g})")]
