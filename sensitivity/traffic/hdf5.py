"""Tables that pandas wrote to HDF5 in its fixed format, read with h5py alone.

The layout of a key ``df``: ``df/axis0`` column names, ``df/axis1`` the index as integers, and for each block of columns
``df/blockK_items`` and ``df/blockK_values`` ``(time, column)``. Nothing is unpickled.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from sensitivity.errors import InputError
from sensitivity.traffic.files import reason

_UNITS = {"s": 1e11, "ms": 1e14, "us": 1e17, "ns": float("inf")}
"""Units of integer times since 1970, and the magnitude below which each is meant, where a file does not say."""


def read_hdf5(path: Path, key: str | None = None) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """Values ``(time, node)``, timestamps (None if the index only counts rows), and column names.

    Args:
        path: the file.
        key: which table, where there are several.

    Raises:
        InputError: not HDF5, truncated, no table in fixed format, several tables without ``key``, or an inconsistent
            one.
    """
    import h5py

    if not h5py.is_hdf5(path):
        raise InputError(f"{path} is not an HDF5 file; if it holds text or an array, name it .csv, .npy or .npz.")
    try:
        with h5py.File(path, "r") as file:
            return _read_table(_find_table(file, key, path), path)
    except (OSError, RuntimeError, KeyError) as error:
        raise InputError(
            f"{path} cannot be read to its end ({reason(error)}); it may be truncated or compressed by a "
            "filter that h5py lacks: get it again and compare its checksum."
        ) from error


def _find_table(file: Any, key: str | None, path: Path) -> Any:
    """The group of the table called ``key``, or of the only one."""
    import h5py

    found: list[str] = []
    other: list[str] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Group) and {"axis0", "axis1", "block0_values"} <= set(item):
            found.append(name)
        elif isinstance(item, h5py.Group) and "table" in item:
            other.append(name)

    file.visititems(visit)
    if {"axis0", "axis1", "block0_values"} <= set(file):
        found.append("/")
    wanted = None if key is None else key.strip("/") or "/"
    if wanted in found:
        return file[wanted]
    if key is None and len(found) == 1:
        return file[found[0]]
    if key is None and found:
        raise InputError(f"{path} holds several tables ({', '.join(sorted(found))}); choose one with key=.")
    if found:
        raise InputError(f"{path} has no table {key!r}; it has {', '.join(sorted(found))}.")
    if other:
        raise InputError(
            f"{path} was written by pandas with format='table' (key {other[0]!r}); write it again with format='fixed', "
            "or as CSV."
        )
    raise InputError(f"{path} holds no pandas table in fixed format (its top level: {', '.join(file) or 'empty'}).")


def _read_table(group: Any, path: Path) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """Puts the blocks of one table together."""
    names = _names(group["axis0"][()], path)
    index = group["axis1"][()]
    timestamps = epoch_times(index, _text(group["axis1"].attrs.get("kind", "")), str(path))
    values = np.full((len(index), len(names)), np.nan)
    column_of = {name: column for column, name in enumerate(names)}
    filled = 0
    for block in sorted(name for name in group if re.fullmatch(r"block\d+_values", name)):
        items = _names(group[block.replace("_values", "_items")][()], path)
        data = group[block]
        if data.dtype.kind not in "fiu" or data.shape != (len(index), len(items)) or not set(items) <= set(names):
            raise InputError(
                f"{path} holds {block} of shape {data.shape} and type {data.dtype}, but {len(index)} times and "
                f"{len(items)} numeric columns are expected."
            )
        values[:, [column_of[name] for name in items]] = data[()]
        filled += len(items)
    if filled != len(names):
        raise InputError(f"{path} names {len(names)} columns, but its blocks hold {filled}.")
    return values, timestamps, names


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _names(values: np.ndarray, path: Path) -> list[str]:
    """Column names as text; integers become their decimal digits."""
    if values.dtype.kind not in "SUiuO" or not all(isinstance(v, bytes | str | int | np.integer) for v in values.flat):
        raise InputError(f"{path} has column names of type {values.dtype}; text or integers are expected.")
    return [_text(value).strip() for value in values]


def epoch_times(index: np.ndarray, kind: str, source: str) -> np.ndarray | None:
    """Integer times since 1970 as datetime64[ns]; None if the index only counts rows.

    Args:
        index: integers.
        kind: what the file says of them, such as ``datetime64[ns]``; where it names no unit, the magnitude decides.
        source: what messages call the file.

    Raises:
        InputError: not integers, or times that cannot be told.
    """
    if index.dtype.kind not in "iu":
        raise InputError(f"{source} has a time index of type {index.dtype}; integers since 1970 are expected.")
    if len(index) == 0 or ("date" not in kind and int(abs(index).max()) < 1e8):
        return None
    named = re.search(r"\[(s|ms|us|ns)\b", kind)
    unit = named.group(1) if named else next(unit for unit, limit in _UNITS.items() if abs(int(index[-1])) < limit)
    return index.astype(np.int64).astype(f"datetime64[{unit}]").astype("datetime64[ns]")
