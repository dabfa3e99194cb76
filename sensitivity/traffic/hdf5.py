"""HDF5 files read with h5py alone: tables that pandas wrote in its fixed format, and plain arrays.

The layout of a pandas key ``df``: ``df/axis0`` column names, ``df/axis1`` the index as integers, and for each block of
columns ``df/blockK_items`` and ``df/blockK_values`` ``(time, column)``. Nothing is unpickled.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from sensitivity.errors import InputError
from sensitivity.traffic.arrays import IDS, TIMES, Members, from_arrays
from sensitivity.traffic.files import reason
from sensitivity.traffic.index import epoch_times, text_times
from sensitivity.traffic.table import Table

_FIXED = {"axis0", "axis1", "block0_values"}


def read_hdf5(path: Path, key: str | None = None, channel: int = 0) -> Table:
    """A pandas table, or else an array ``(time, node[, channel])``.

    Args:
        path: the file.
        key: which table or array, where there are several.
        channel: of an array.

    Raises:
        InputError: not HDF5, truncated, nothing that can be read, several without ``key``, or an inconsistent table.
    """
    import h5py

    if not h5py.is_hdf5(path):
        raise InputError(
            f"{path} is not an HDF5 file (it may be damaged or cut short); if it holds text or an array, name it .csv, "
            ".npy or .npz."
        )
    try:
        with h5py.File(path, "r") as file:
            return _read(file, key, channel, path)
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path} cannot be read to its end ({reason(error)}); it may be truncated or compressed by a "
            "filter that h5py lacks: get it again and compare its checksum."
        ) from error


def _read(file: Any, key: str | None, channel: int, path: Path) -> Table:
    tables, foreign, arrays = _contents(file)
    wanted = None if key is None else key.strip("/") or "/"
    if wanted in tables or (key is None and len(tables) == 1):
        if channel:
            raise InputError(f"{path} holds a table without channels, so there is no channel {channel}.")
        return _read_table(file[tables[0] if wanted is None else wanted], path)
    if key is None and tables:
        raise InputError(
            f"{path} holds several tables ({', '.join(sorted(tables))}); choose one with key= (data info: --key)."
        )
    if wanted in foreign or (foreign and not tables and not arrays):
        name = wanted if wanted in foreign else next(iter(foreign))
        raise InputError(
            f"{path} was written by pandas with {foreign[name]} (key {name!r}); write a plain frame with "
            "format='fixed', or as CSV."
        )
    if arrays and (key is None or wanted in arrays):
        return from_arrays(Members(file, arrays), key, channel, path)
    if key is not None and (tables or arrays):
        raise InputError(f"{path} has no table {key!r}; it has {', '.join(sorted(tables + arrays))}.")
    raise InputError(
        f"{path} holds no pandas table in fixed format and no array of numbers (its top level: "
        f"{', '.join(file) or 'empty'})."
    )


def _contents(file: Any) -> tuple[list[str], dict[str, str], list[str]]:
    """Names of the tables in fixed format, what else pandas wrote under which name, and names of plain arrays."""
    import h5py

    tables: list[str] = ["/"] if set(file) >= _FIXED else []
    foreign: dict[str, str] = {}
    arrays: list[str] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Group) and set(item) >= _FIXED:
            tables.append(name)
        elif isinstance(item, h5py.Group) and "table" in item:
            foreign[name] = "format='table'"
        elif isinstance(item, h5py.Group) and "pandas_type" in item.attrs:
            several = any(part.startswith(("axis0_level", "axis1_level")) for part in item)
            foreign[name] = "names of several levels" if several else f"the type {_text(item.attrs['pandas_type'])!r}"
        elif isinstance(item, h5py.Dataset) and (item.ndim in (2, 3) or name in (*TIMES, *IDS)):
            arrays.append(name)

    file.visititems(visit)
    inside = tuple(f"{name.strip('/')}/".lstrip("/") for name in (*tables, *foreign))
    return tables, foreign, [name for name in arrays if not name.startswith(inside) or not inside]


def _read_table(group: Any, path: Path) -> Table:
    """Puts the blocks of one table together."""
    names = _names(group["axis0"][()], path)
    timestamps, zone = _times(group["axis1"], path)
    rows = len(group["axis1"])
    values = np.full((rows, len(names)), np.nan)
    column_of = {name: column for column, name in enumerate(names)}
    filled, kinds = 0, set()
    for block in sorted(name for name in group if re.fullmatch(r"block\d+_values", name)):
        items = _names(group[block.replace("_values", "_items")][()], path)
        data = group[block]
        if data.dtype.kind not in "fiu" or data.shape != (rows, len(items)) or not set(items) <= set(names):
            raise InputError(
                f"{path} holds {block} of shape {data.shape} and type {data.dtype}, but {rows} times and "
                f"{len(items)} numeric columns are expected."
            )
        values[:, [column_of[name] for name in items]] = data[()]
        kinds.add(str(data.dtype))
        filled += len(items)
    if filled != len(names):
        raise InputError(f"{path} names {len(names)} columns, but its blocks hold {filled}.")
    key = group.name.strip("/") or "/"
    return Table(values, timestamps, names, f"pandas HDF5, key {key!r}, {' and '.join(sorted(kinds))}", zone)


def _times(index: Any, path: Path) -> tuple[np.ndarray | None, str]:
    """Times of the local clock, and the zone if the file names one."""
    if index.dtype.kind in "SO":
        return text_times([_text(value) for value in index[()]], str(path))
    kind = "period" if _text(index.attrs.get("index_class", "")) == "period" else _text(index.attrs.get("kind", ""))
    times = epoch_times(index[()], kind, str(path))
    zone = index.attrs.get("tz")
    if times is None or zone is None:
        return times, ""
    return _local(times, _text(zone), path), _text(zone)


def _local(times: np.ndarray, zone: str, path: Path) -> np.ndarray:
    """Times that pandas stored in UTC, as the clock of their zone shows them."""
    from datetime import datetime, timezone
    from zoneinfo import ZoneInfo

    try:
        info = ZoneInfo(zone)
    except (ValueError, OSError, KeyError) as error:
        raise InputError(
            f"{path} has times of the zone {zone!r}, which is not known here; write it again with local times "
            "(with pandas: frame.tz_localize(None))."
        ) from error
    hours, where = np.unique(times.astype("datetime64[h]"), return_inverse=True)
    offsets = [datetime.fromtimestamp(int(hour) * 3600, timezone.utc).astimezone(info).utcoffset() for hour in
               hours.astype(np.int64)]  # fmt: skip
    return times + np.array(offsets, dtype="timedelta64[ns]")[where]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _names(values: np.ndarray, path: Path) -> list[str]:
    """Column names as text; integers become their decimal digits."""
    if values.dtype.kind not in "SUiuO" or not all(isinstance(v, bytes | str | int | np.integer) for v in values.flat):
        raise InputError(f"{path} has column names of type {values.dtype}; text or integers are expected.")
    return [_text(value).strip() for value in values]
