"""Graphs from text: lists of edges, and matrices with or without ids."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sensitivity.errors import InputError
from sensitivity.traffic.text import cells_of, read_lines, separator_of

_FROM, _TO = ("from", "source", "src", "start"), ("to", "target", "dst", "end")
_DISTANCES = ("cost", "distance", "dist", "length", "metres", "meters")
_WEIGHTS = ("weight", "w", "similarity", "value")


def read_edges(
    path: Path, sensor_ids: list[str], kernel: Callable[[np.ndarray], np.ndarray]
) -> tuple[dict[str, int] | None, np.ndarray]:
    """Ids (None if the file has none) and the matrix of a graph in text.

    Args:
        path: a list of edges with the header ``from,to,cost`` (a road distance) or ``from,to,weight``, or without a
            header, as three columns of distances between sensors of the data; or a matrix, with or without ids in its
            first line and column.
        sensor_ids: sensors of the data.
        kernel: turns distances, infinite where no road is listed, into weights.

    Raises:
        InputError: naming the line that cannot be read, or a header that does not say what the numbers are.
    """
    lines = read_lines(path)
    separator = separator_of(lines[0])
    rows = [cells_of(line, separator) for line in lines]
    head = [cell.lower() for cell in rows[0]]
    if head[0] in _FROM:
        return _listed(rows[1:], path, 2, sensor_ids, _kernel(head, path, kernel))
    known = set(sensor_ids)
    if len(rows[0]) == 3 and "" not in rows[0] and not len(rows) == 3 == len(known):
        return _listed(rows, path, 1, sensor_ids, kernel)
    return _matrix(rows, path, known)


def _kernel(head: list[str], path: Path, kernel: Callable[[np.ndarray], np.ndarray]) -> Callable:
    """What makes weights of the numbers under this header."""
    if len(head) >= 2 and head[1] in _TO:
        if len(head) == 2:
            return lambda table: np.isfinite(table).astype(np.float32)
        if head[2] in _DISTANCES:
            return kernel
        if head[2] in _WEIGHTS:
            return lambda table: np.where(np.isfinite(table), table, 0).astype(np.float32)
    raise InputError(
        f"{path} has the header {','.join(head)!r}; edges are listed under from,to,cost for road distances or "
        "from,to,weight for weights."
    )


def _listed(
    rows: list[list[str]], path: Path, line: int, sensor_ids: list[str], kernel: Callable[[np.ndarray], np.ndarray]
) -> tuple[dict[str, int], np.ndarray]:
    """A list of edges; ``line`` is the number of its first line."""
    place = {name: row for row, name in enumerate(sensor_ids)}
    table = np.full((len(place), len(place)), np.inf)
    known: set[str] = set()
    if not rows:
        raise InputError(f"{path} has a header but lists no edges.")
    for number, cells in enumerate(rows, line):
        value = _number(cells[2]) if len(cells) > 2 else 1.0 if len(cells) == 2 else None
        if value is None or not math.isfinite(value) or value < 0:
            raise InputError(
                f"{path} has {','.join(cells)!r} in line {number}; from, to and a number >= 0 are expected there."
            )
        known.update(cells[:2])
        if cells[0] in place and cells[1] in place:
            table[place[cells[0]], place[cells[1]]] = value
    if not known & set(place):
        raise InputError(
            f"{path} lists edges between sensors such as {rows[0][0]!r}, none of which the data has (its ids look like "
            f"{next(iter(place), '')!r}); give the graph that belongs to this data."
        )
    return {name: row for name, row in place.items() if name in known}, kernel(table)


def _matrix(rows: list[list[str]], path: Path, known: set[str]) -> tuple[dict[str, int] | None, np.ndarray]:
    """A matrix; its first line and column may be ids."""
    ids = None
    if rows[0][0] == "" or rows[0][-1] in known or _number(rows[0][-1]) is None:
        size = len(rows) - 1
        names = rows[0][-size:] if size else []
        if rows[1:] and len(rows[1]) == size + 1:
            rows = [rows[0], *(row[1:] for row in rows[1:])]
        ids, rows = {name: row for row, name in enumerate(names)}, rows[1:]
        if len(ids) != len(rows):
            raise InputError(f"{path} names {len(ids)} different nodes in its first line, but has {len(rows)} rows.")
    for number, cells in enumerate(rows, 1 if ids is None else 2):
        wrong = next((cell for cell in cells if _number(cell) is None), None)
        if wrong is not None or len(cells) != len(rows[0]):
            what = f"{len(cells)} numbers instead of {len(rows[0])}" if wrong is None else repr(wrong)
            raise InputError(f"{path} has {what} in line {number}, so it cannot be read as a graph.")
    return ids, np.array([[float(cell) for cell in cells] for cells in rows])


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
