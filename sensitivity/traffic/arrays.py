"""Bare arrays ``(time, node[, channel])`` by name, as NumPy files and plain HDF5 files hold them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.traffic.index import epoch_times
from sensitivity.traffic.table import Table

SPEEDS = ("data", "speed", "values")
TIMES = ("timestamps", "time", "times", "index")
IDS = ("sensor_ids", "ids")


class Members(Mapping[str, Any]):
    """The arrays of an opened file, each read when it is asked for.

    Args:
        file: with the arrays by name, such as an opened ``.npz`` file.
        names: of the arrays.
    """

    def __init__(self, file: Any, names: list[str]) -> None:
        self._file, self._names = file, names

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._file[name][()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def from_arrays(arrays: Mapping[str, Any], key: str | None, channel: int, path: Path) -> Table:
    """The speeds among named arrays, with times and ids where the file has them.

    Args:
        arrays: by name.
        key: of the speeds, where it is none of ``data``, ``speed``, ``values``, nor the only array.
        channel: of an array ``(time, node, channel)``.
        path: what messages call the file.

    Raises:
        InputError: no such array, several without ``key``, or arrays of the wrong shape or type.
    """
    found = _speeds_name(arrays, key, path)
    values = speeds(arrays[found], channel, path)
    times, ids = _first(arrays, TIMES), _first(arrays, IDS)
    if times is not None and times.dtype.kind != "M":
        times = epoch_times(times, "", str(path))
    table = Table(
        values,
        None if times is None else times.astype("datetime64[ns]"),
        None if ids is None else [_text(name) for name in ids],
        f"array {found!r}, {_kind(arrays[found])}",
    )
    check_orientation(table, path)
    return table


def from_array(array: np.ndarray, channel: int, path: Path) -> Table:
    """The speeds of a file that holds one array and nothing else; errors as in :func:`from_arrays`."""
    table = Table(speeds(array, channel, path), None, None, f"array, {_kind(array)}")
    check_orientation(table, path)
    return table


def speeds(array: np.ndarray, channel: int, path: Path) -> np.ndarray:
    """One channel of ``(time, node[, channel])``, float64.

    Raises:
        InputError: another shape, no numbers, or no such channel.
    """
    if array.dtype.kind not in "fiu" or array.ndim not in (2, 3) or 0 in array.shape:
        raise InputError(
            f"{path} holds an array of shape {array.shape} and type {array.dtype}; numbers (time, node) or "
            "(time, node, channel) are expected."
        )
    if array.ndim == 2:
        if channel:
            raise InputError(f"{path} holds one channel only, so there is no channel {channel}; leave channel out.")
        return array.astype(np.float64)
    if not 0 <= channel < array.shape[2]:
        raise InputError(f"{path} has {array.shape[2]} channels, counted from 0; there is no channel {channel}.")
    return array[:, :, channel].astype(np.float64)


def check_orientation(table: Table, path: Path) -> None:
    """Refuses or warns of speeds ``(node, time)``.

    Raises:
        InputError: the times fit the columns, not the rows.
    """
    rows, columns = table.values.shape
    times, names = table.timestamps, table.names
    turned = times is not None and len(times) == columns != rows
    if turned or (names is not None and len(names) == rows != columns):
        raise InputError(
            f"{path} holds speeds of shape {table.values.shape}, which fit its times and ids only as (node, time); "
            "store them transposed, as (time, node)."
        )
    if times is None and rows < columns:
        warnings.warn(
            f"{path} has fewer rows than columns: read as {rows} times of {columns} sensors; if it is the other way "
            "round, store it transposed, as (time, node).",
            SensitivityWarning,
            stacklevel=5,
        )


def _speeds_name(arrays: Mapping[str, Any], key: str | None, path: Path) -> str:
    listed = ", ".join(arrays) or "none"
    if key is not None:
        if key.strip("/") not in arrays:
            raise InputError(f"{path} has no array {key!r}; it has {listed}.")
        return key.strip("/")
    found = next((name for name in SPEEDS if name in arrays), None)
    others = [name for name in arrays if name not in (*TIMES, *IDS, "graph")]
    if found is not None:
        return found
    if len(others) == 1:
        return others[0]
    if {"x", "y"} <= set(arrays):
        raise InputError(f"{path} holds windows that were cut already ({listed}); give the series they were cut from.")
    names = " or ".join(map(repr, SPEEDS))
    raise InputError(f"{path} has no array {names}; it has {listed}: choose one with key= (data info: --key).")


def _first(arrays: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((np.asarray(arrays[name]) for name in names if name in arrays), None)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _kind(array: np.ndarray) -> str:
    shape = " x ".join(map(str, array.shape))
    return f"{array.dtype} ({shape})"
