"""Speeds from comma-separated text, and from text with other separators."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np

from sensitivity.errors import InputError
from sensitivity.traffic.arrays import check_orientation
from sensitivity.traffic.index import is_time, text_times
from sensitivity.traffic.table import Table

_TIME_NAMES = {"", "time", "date", "datetime", "timestamp", "index"}
_LOWEST_ID = 200.0
"""A first line whose numbers all exceed this is a header of sensor ids, not a row of speeds."""
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", " ": "blanks"}


def read_csv(path: Path) -> Table:
    """Values ``(time, node)``; times if the first column holds them; sensor ids if the first line does.

    The separator is the comma, or a semicolon or tab where there is one in the first line, or else blanks. An empty
    cell is a missing reading.

    Raises:
        InputError: not text, empty, lines of unequal length, a cell that is no number, a time that cannot be read.
    """
    lines = read_lines(path)
    separator = separator_of(lines[0])
    first = cells_of(lines[0], separator)
    header = _is_header(first, separator)
    body = lines[1:] if header else lines
    if not body:
        raise InputError(f"{path} has a header but no rows.")
    timed = is_time(cells_of(body[0], separator)[0]) or (header and first[0].lower() in _TIME_NAMES)
    names = first[timed:] if header else None
    stamps, values = _columns(body, separator, timed, path, 1 + header)
    if names is not None and values.shape[1] != len(names):
        raise InputError(f"{path} names {len(names)} sensors, but its rows hold {values.shape[1]} values.")
    times, zone = text_times(stamps, str(path)) if timed else (None, "")
    table = Table(values, times, names, f"text, {_SEPARATORS[separator]} between values", zone)
    check_orientation(table, path)
    return table


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank.

    Raises:
        InputError: not UTF-8, or empty.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}); if it is a CSV file, save it as "
            "UTF-8."
        ) from error
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise InputError(f"{path} is empty.")
    return lines


def separator_of(line: str) -> str:
    """What stands between the cells of a line."""
    return next((mark for mark in (";", "\t", ",") if mark in line), " " if " " in line.strip() else ",")


def cells_of(line: str, separator: str) -> list[str]:
    """The cells of a line, without their quotes."""
    if separator == " ":
        return line.split()
    if '"' not in line:
        return [cell.strip() for cell in line.split(separator)]
    return [cell.strip() for cell in next(csv.reader([line], delimiter=separator, skipinitialspace=True))]


def _columns(body: list[str], separator: str, timed: bool, path: Path, offset: int) -> tuple[list[str], np.ndarray]:
    """The first column as text if it holds times, and the numbers: fast where every cell is a number."""
    if separator != " " and '"' not in body[0]:
        pairs = [line.partition(separator) for line in body] if timed else [("", "", line) for line in body]
        try:
            values = np.loadtxt([rest for *_, rest in pairs], delimiter=separator, ndmin=2, comments=None)
            return [stamp.strip() for stamp, *_ in pairs], values
        except ValueError:
            pass  # the slow way finds out what is wrong
    rows = [cells_of(line, separator) for line in body]
    usual = len(rows[0])
    for row, cells in enumerate(rows):
        if len(cells) != usual:
            raise InputError(
                f"{path} has {len(cells) - timed} values in line {row + offset}, but {usual - timed} above; it may be "
                "truncated."
            )
    values = np.array([[_cell(c, separator, path, row + offset) for c in cells[timed:]] for row, cells in
                       enumerate(rows)], dtype=np.float64)  # fmt: skip
    return [cells[0] for cells in rows], values


def _cell(cell: str, separator: str, path: Path, line: int) -> float:
    """A number; an empty cell is NaN."""
    value = _number(cell, separator) if cell else np.nan
    if value is None:
        raise InputError(
            f"{path} has {cell!r} in line {line}, where a speed is expected; leave the cell empty where one is missing."
        )
    return value


def _number(cell: str, separator: str) -> float | None:
    """A number, between semicolons also with a decimal comma; None for anything else."""
    if separator == ";" and re.fullmatch(r"[+-]?\d+,\d+", cell):
        cell = cell.replace(",", ".")
    try:
        return float(cell)
    except ValueError:
        return None


def _is_header(cells: list[str], separator: str) -> bool:
    """True for a line of names: one that is neither times nor speeds."""
    rest = [_number(cell, separator) for cell in cells[1:]] or [None]
    if any(number is None for number in rest) and any(cells[1:]):
        return any(number is None for number, cell in zip(rest, cells[1:], strict=False) if cell)
    numbers = [number for number in [_number(cells[0], separator), *rest] if number is not None]
    ids = bool(numbers) and min(numbers) > _LOWEST_ID
    return ids or cells[0].lower() in _TIME_NAMES
