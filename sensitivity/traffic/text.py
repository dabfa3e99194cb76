"""Speeds from comma-separated text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sensitivity.errors import InputError

_TIME_NAMES = {"", "time", "date", "datetime", "timestamp", "index"}
_LOWEST_ID = 200.0
"""A first line whose numbers all exceed this is a header of sensor ids, not a row of speeds."""


def read_csv(path: Path) -> tuple[np.ndarray, np.ndarray | None, list[str] | None]:
    """Values ``(time, node)``; times if the first column holds them; sensor ids if the first line does.

    An empty cell is a missing reading.

    Raises:
        InputError: not text, empty, lines of unequal length, a cell that is no number, a time that cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text ({error.reason} at byte {error.start}), so it is no CSV file.") from error
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise InputError(f"{path} is empty.")
    first = [cell.strip().strip('"') for cell in lines[0].split(",")]
    header = _is_header(first)
    body = lines[1:] if header else lines
    if not body:
        raise InputError(f"{path} has a header but no rows.")
    timed = _is_time(body[0].partition(",")[0]) or (header and first[0].lower() in _TIME_NAMES)
    names = first[timed:] if header else None
    cells = [line.partition(",")[2] for line in body] if timed else body
    values = _numbers(cells, path, offset=1 + header)
    if names is not None and values.shape[1] != len(names):
        raise InputError(f"{path} names {len(names)} sensors, but its rows hold {values.shape[1]} values.")
    return values, _times([line.partition(",")[0] for line in body], path) if timed else None, names


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _is_header(cells: list[str]) -> bool:
    """True for a line of names: one that is neither times nor speeds."""
    rest = [_number(cell) for cell in cells[1:]] or [None]
    if any(number is None for number in rest) and any(cells[1:]):
        return any(number is None for number, cell in zip(rest, cells[1:], strict=False) if cell)
    numbers = [number for number in [_number(cells[0]), *rest] if number is not None]
    ids = bool(numbers) and min(numbers) > _LOWEST_ID
    return ids or cells[0].lower() in _TIME_NAMES


def _is_time(cell: str) -> bool:
    """True for a date, such as 2012-03-01 00:00:00; a bare number is none."""
    cell = cell.strip().strip('"')
    if _number(cell) is not None:
        return False
    try:
        return not np.isnat(np.datetime64(cell))
    except ValueError:
        return False


def _times(cells: list[str], path: Path) -> np.ndarray | None:
    """Times of the first column; None if it only counts rows."""
    from sensitivity.traffic.hdf5 import epoch_times

    cells = [cell.strip().strip('"') for cell in cells]
    if all(cell.isdigit() for cell in cells):
        return epoch_times(np.array(cells, dtype=np.int64), "", str(path))
    for row, cell in enumerate(cells):
        if not _is_time(cell):
            raise InputError(
                f"{path} has {cell!r} in the time column of row {row}; write times as 2012-03-01 00:05:00."
            )
    return np.array(cells, dtype="datetime64[ns]")


def _numbers(cells: list[str], path: Path, offset: int) -> np.ndarray:
    """A matrix from lines of cells: fast where every cell is a number, else cell by cell."""
    widths = {line.count(",") for line in cells}
    if len(widths) > 1:
        usual = cells[0].count(",")
        row = next(row for row, line in enumerate(cells) if line.count(",") != usual)
        raise InputError(
            f"{path} has {cells[row].count(',') + 1} values in line {row + offset}, but {usual + 1} above; it may be "
            "truncated."
        )
    try:
        return np.loadtxt(cells, delimiter=",", ndmin=2)
    except ValueError:
        pass
    rows = [[part.strip() for part in line.split(",")] for line in cells]
    for row, parts in enumerate(rows):
        for part in parts:
            if part and _number(part) is None:
                raise InputError(f"{path} has {part!r} in line {row + offset}, where a speed is expected.")
    return np.array([[float(part) if part else np.nan for part in parts] for parts in rows])
