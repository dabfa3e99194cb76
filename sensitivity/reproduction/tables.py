"""The comparison as tables: what they say, and how they look on a terminal, in Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tabulate import tabulate

WIDTH = 80
PLUS_MINUS = "\u00b1"


@dataclass(frozen=True)
class Table:
    """A table of finished texts.

    Attributes:
        title: what it shows.
        header: one text for every column; a line break counts on the terminal only.
        rows: the cells; the first of each row is its name.
        captions: what the reader should know, line by line.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    captions: tuple[str, ...] = ()

    def console(self) -> str:
        """For a terminal of 80 columns."""
        from rich.console import Console
        from rich.table import Table as Drawn

        drawn = Drawn(box=None, pad_edge=False, padding=(0, 1 if len(self.header) > 7 else 2, 0, 0))
        for place, head in enumerate(self.header):
            drawn.add_column(head, justify="right" if place else "left", no_wrap=True)
        for row in self.rows:
            drawn.add_row(*(cell.replace("[", r"\[") for cell in row))
        out = io.StringIO()
        Console(file=out, width=WIDTH, highlight=False, color_system=None).print(drawn)
        lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
        return "\n".join([self.title, *lines, *self.captions])

    def markdown(self) -> str:
        """With the title as a heading."""
        notes = "".join(f"\n{line}  " for line in self.captions)
        return f"### {self.title}\n\n{self._drawn('github')}\n{notes}".rstrip() + "\n"

    def latex(self) -> str:
        r"""A ``table`` with booktabs rules; needs ``\usepackage{booktabs}``."""
        body = self._drawn("latex_booktabs").replace(PLUS_MINUS, r"$\pm$")
        caption = _escaped(". ".join([self.title, *self.captions])).replace(PLUS_MINUS, r"$\pm$")
        return f"\\begin{{table}}\n\\centering\n\\caption{{{caption}.}}\n{body}\n\\end{{table}}\n"

    def _drawn(self, style: str) -> str:
        align = ("left", *["right"] * (len(self.header) - 1))
        header = [text.replace("\n", " ") for text in self.header]
        return tabulate(self.rows, header, style, colalign=align, disable_numparse=True)


def as_csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Numbers in full, for other programs; an empty cell where a number is undefined."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow(["" if isinstance(cell, float) and math.isnan(cell) else cell for cell in row])
    return text.getvalue()


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation over the seeds.

    >>> spread([3.0, 3.2], 3)
    '3.100\u00b10.141'
    >>> spread([3.0], 3)
    '3.000'
    """
    known = np.array([value for value in values if math.isfinite(value)])
    if len(known) == 0:
        return "-"
    mean = f"{known.mean():.{digits}f}"
    return mean if len(known) < 2 else f"{mean}{PLUS_MINUS}{known.std(ddof=1):.{digits}f}"


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits.

    >>> significant(0.012345), significant(117.4), significant(0.0)
    ('0.0123', '117', '0')
    """
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:.{min(6, max(0, digits - 1 - math.floor(math.log10(abs(value)))))}f}"


def signed(value: float, digits: int) -> str:
    """A difference, with its sign; no minus before a rounded zero.

    >>> signed(0.01234, 3), signed(-0.0001, 3)
    ('+0.012', '+0.000')
    """
    return "-" if not math.isfinite(value) else f"{round(value, digits) + 0.0:+.{digits}f}"


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "%&_#" else letter for letter in text)
