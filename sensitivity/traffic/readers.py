"""One entry, ``read``, for every file layout in which METR-LA and its kin are met."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.traffic.arrays import Members, from_array, from_arrays
from sensitivity.traffic.data import Traffic, assemble
from sensitivity.traffic.files import check_file, checksum, reason
from sensitivity.traffic.graph import read_graph
from sensitivity.traffic.hdf5 import read_hdf5
from sensitivity.traffic.index import is_time, one_time
from sensitivity.traffic.table import Table
from sensitivity.traffic.text import read_csv

METR_LA_START = "2012-03-01T00:00"
MINUTES_PER_YEAR = 366 * 24 * 60
HIGHEST = 150.0
"""Values above this, in mph, are no speeds of cars."""


def read(
    path: Any,
    graph: Any = None,
    *,
    key: str | None = None,
    channel: int = 0,
    start: str | None = None,
    step: float | int | None = None,
) -> Traffic:
    """Reads speeds, in mph, and on request their road graph.

    ==================  =====================================================================================
    ``.h5``             pandas' fixed format, as in the official files of METR-LA and PEMS-BAY, with times in any
                        unit; or arrays as in ``.npz``
    ``.npz``            ``data``, ``speed`` or ``values`` ``(time, node[, channel])``; ``timestamps``,
                        ``sensor_ids`` and ``graph`` if it has them (what :func:`write` writes)
    ``.npy``            ``(time, node[, channel])``
    ``.csv``            a header of sensor ids and the time in the first column; or one or neither of the two;
                        semicolons, tabs and blanks are read too
    ==================  =====================================================================================

    A zero or a NaN is a missing reading. A file without times gets them from ``start`` and ``step``. Where a local
    clock is put forward or back for summer time, as in PEMS-BAY, the rows around it follow each other.

    Args:
        path: the file.
        graph: the graph's file (see :func:`sensitivity.traffic.graph.read_graph`); no other file is looked for.
        key: name of the table or array, where a file has several.
        channel: which channel of an array ``(time, node, channel)``.
        start: time of the first row, such as ``2012-03-01T00:00``, for a file without times.
        step: minutes between rows, for a file without times.

    Raises:
        InputError: no such file, a directory, a file that is foreign, truncated, irregular in time, without valid
            readings, or with values that are no speeds; a graph that does not fit.
    """
    path = check_file(path, "the traffic data")
    table = open_table(path, key, channel)
    if table.timestamps is not None and (start is not None or step is not None):
        raise InputError(f"{path} has its own times; leave out start and step.")
    return assembled(table, path, graph, {"key": key, "channel": channel, "start": start, "step": step})


def assembled(table: Table, path: Path, graph: Any, options: dict[str, Any]) -> Traffic:
    """Traffic from what its file holds; arguments and errors as those of :func:`read`."""
    values, names, timestamps = table.values, table.names, table.timestamps
    if timestamps is None:
        timestamps = count_times(len(values), options["start"], options["step"], path)
    ids = names if names is not None else [str(node) for node in range(values.shape[1])]
    origin: dict[str, Any] = {"kind": "file", "path": str(path.resolve()), "sha256": checksum(path)}
    origin |= {"options": {name: value for name, value in options.items() if value not in (None, 0)}}
    traffic = assemble(values, timestamps, ids, str(path), name=path.stem, origin=origin)
    _warn(table, path)
    if graph is None:
        return _with_own_graph(traffic, path)
    matrix = read_graph(graph, ids, named=names is not None)
    origin |= {"graph": str(Path(graph).resolve())}
    origin |= {"graph_sha256": checksum(Path(graph))}
    return dataclasses.replace(traffic, graph=matrix)


def write(traffic: Traffic, path: str | os.PathLike[str]) -> Path:
    """Writes traffic as one ``.npz`` file that :func:`read` reads back, graph included.

    Raises:
        InputError: a name that does not end in ``.npz``.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise InputError(f"traffic is written as .npz, but the name is {path.name!r}.")
    arrays: dict[str, Any] = {
        "data": traffic.speed.numpy(),
        "timestamps": traffic.timestamps,
        "sensor_ids": np.array(traffic.sensor_ids),
    }
    if traffic.graph is not None:
        arrays["graph"] = traffic.graph.numpy()
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    temporary.replace(path)
    return path


def open_table(path: Path, key: str | None = None, channel: int = 0) -> Table:
    """What a file holds, unchecked: its times may be irregular, its values may be no speeds.

    Raises:
        InputError: a file that is foreign, truncated or of an unknown kind; no such table, array or channel.
    """
    if isinstance(channel, bool) or not isinstance(channel, int) or channel < 0:
        raise InputError(f"channel must be an integer of at least 0, not {channel!r}.")
    suffix = path.suffix.lower()
    if suffix in (".h5", ".hdf5", ".hdf"):
        return read_hdf5(path, key, channel)
    if suffix in (".csv", ".txt", ".tsv", ".npy") and key is not None:
        raise InputError(f"{path} holds one table without a name, so there is no {key!r}; leave key out.")
    if suffix in (".csv", ".txt", ".tsv"):
        if channel:
            raise InputError(f"{path} holds a table without channels, so there is no channel {channel}.")
        return read_csv(path)
    if suffix not in (".npy", ".npz"):
        raise InputError(f"{path} is of an unknown kind; the name must end in .h5, .npz, .npy or .csv.")
    try:
        if suffix == ".npy":
            return from_array(np.load(path, allow_pickle=False), channel, path)
        with np.load(path, allow_pickle=False) as file:
            return from_arrays(Members(file, file.files), key, channel, path)
    except InputError:
        raise
    except Exception as error:  # zip, header and pickle errors are of many kinds
        raise InputError(f"{path} is not a complete {suffix} file of numbers ({reason(error)}).") from error


def count_times(rows: int, start: str | None, step: float | int | None, path: Path) -> np.ndarray:
    """Times of a file that has none; arguments and errors as those of :func:`read`."""
    if start is None or step is None:
        warnings.warn(
            f"{path} has no times: its rows are taken as {step or 5:g}-minute steps from {start or METR_LA_START}; "
            "say otherwise with start= and step= of traffic.read, and keep it with traffic.write.",
            SensitivityWarning,
            stacklevel=4,
        )
    if start is not None and not (isinstance(start, str) and is_time(start)):
        raise InputError(f"start is {start!r}, but must be a time such as 2012-03-01T00:00.")
    first = one_time(start or METR_LA_START, "start")
    minutes = 5.0 if step is None else float(step)
    if not 0 < minutes <= MINUTES_PER_YEAR:
        raise InputError(f"step is {step!r} minutes, but must be positive and at most a year.")
    return first + np.arange(rows) * np.timedelta64(round(minutes * 60e9), "ns")


def _warn(table: Table, path: Path) -> None:
    """Says what the reader of the data should know."""
    values = table.values
    if table.zone:
        text = f"the times of {path} name the zone {table.zone}: its local clock is kept, the zone is dropped."
        warnings.warn(text, SensitivityWarning, stacklevel=4)
    nan = int(np.isnan(values).sum())
    if nan:
        text = f"{path} has {nan} NaN values ({100 * nan / values.size:.2f} %): they count as missing, like zeros."
        warnings.warn(text, SensitivityWarning, stacklevel=4)
    highest = float(np.nanmax(values))
    if highest > HIGHEST:
        text = f"{path} has values up to {highest:g}: these are no speeds in mph; choose a channel or convert them."
        warnings.warn(text, SensitivityWarning, stacklevel=4)


def _with_own_graph(traffic: Traffic, path: Path) -> Traffic:
    """The graph that :func:`write` stored beside the speeds, if there is one."""
    if path.suffix.lower() != ".npz":
        return traffic
    with np.load(path, allow_pickle=False) as file:
        own = "graph" in file
    return dataclasses.replace(traffic, graph=read_graph(path, traffic.sensor_ids)) if own else traffic
