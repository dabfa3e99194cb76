"""One entry, ``read``, for every file layout in which METR-LA and its kin are met."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.traffic.data import Traffic, assemble
from sensitivity.traffic.files import check_file, checksum, reason
from sensitivity.traffic.graph import read_graph
from sensitivity.traffic.hdf5 import epoch_times, read_hdf5
from sensitivity.traffic.text import read_csv

METR_LA_START = "2012-03-01T00:00"
HIGHEST = 150.0
"""Values above this, in mph, are no speeds of cars."""

_Raw = tuple[np.ndarray, np.ndarray | None, list[str] | None]


def read(
    path: str | os.PathLike[str],
    graph: str | os.PathLike[str] | None = None,
    *,
    key: str | None = None,
    channel: int = 0,
    start: str | None = None,
    step: float | int | None = None,
) -> Traffic:
    """Reads speeds, in mph, and on request their road graph.

    ==================  =====================================================================================
    ``.h5``             pandas' fixed format, as in the official METR-LA file; times in any unit
    ``.npz``            ``data``, ``speed`` or ``values`` ``(time, node[, channel])``; ``timestamps``,
                        ``sensor_ids`` and ``graph`` if it has them (what :func:`write` writes)
    ``.npy``            ``(time, node[, channel])``
    ``.csv``            a header of sensor ids and the time in the first column; or neither of the two
    ==================  =====================================================================================

    A zero or a NaN is a missing reading. A file without times gets them from ``start`` and ``step``.

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
    path = check_file(Path(path), "the traffic data")
    values, timestamps, names = _read_raw(path, key, channel)
    if timestamps is None:
        timestamps = _count_times(len(values), start, step, path)
    elif start is not None or step is not None:
        raise InputError(f"{path} has its own times; leave out start and step.")
    ids = names if names is not None else [str(node) for node in range(values.shape[1])]
    options = {"key": key, "channel": channel, "start": start, "step": step}
    origin: dict[str, Any] = {"kind": "file", "path": str(path.resolve()), "sha256": checksum(path)}
    origin |= {"options": {name: value for name, value in options.items() if value not in (None, 0)}}
    traffic = assemble(values, timestamps, ids, str(path), name=path.stem, origin=origin)
    _warn(values, path)
    if graph is None:
        return _with_own_graph(traffic, path)
    origin |= {"graph": str(Path(graph).resolve())}
    matrix = read_graph(graph, ids, named=names is not None)
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


def _read_raw(path: Path, key: str | None, channel: int) -> _Raw:
    """Values ``(time, node)``, and times and names if the file has them."""
    suffix = path.suffix.lower()
    if suffix in (".h5", ".hdf5", ".hdf"):
        return read_hdf5(path, key)
    if suffix in (".csv", ".txt"):
        return read_csv(path)
    if suffix not in (".npy", ".npz"):
        raise InputError(f"{path} is of an unknown kind; the name must end in .h5, .npz, .npy or .csv.")
    try:
        if suffix == ".npy":
            return _speeds(np.load(path, allow_pickle=False), channel, path), None, None
        with np.load(path, allow_pickle=False) as file:
            return _from_npz(dict(file), key, channel, path)
    except InputError:
        raise
    except Exception as error:  # zip, header and pickle errors are of many kinds
        raise InputError(f"{path} is not a complete {suffix} file of numbers ({reason(error)}).") from error


def _from_npz(arrays: dict[str, np.ndarray], key: str | None, channel: int, path: Path) -> _Raw:
    names = [key] if key else ["data", "speed", "values"]
    found = next((name for name in names if name in arrays), None)
    if found is None:
        raise InputError(f"{path} has no array {' or '.join(map(repr, names))}; it has {', '.join(arrays) or 'none'}.")
    times, ids = arrays.get("timestamps"), arrays.get("sensor_ids")
    if times is not None and times.dtype.kind != "M":
        times = epoch_times(times, "", str(path))
    return (
        _speeds(arrays[found], channel, path),
        times if times is None else times.astype("datetime64[ns]"),
        ids if ids is None else [str(name) for name in ids],
    )


def _speeds(array: np.ndarray, channel: int, path: Path) -> np.ndarray:
    """One channel of ``(time, node[, channel])``."""
    if array.dtype.kind not in "fiu" or array.ndim not in (2, 3):
        raise InputError(
            f"{path} holds an array of shape {array.shape} and type {array.dtype}; numbers (time, node) or "
            "(time, node, channel) are expected."
        )
    if array.ndim == 2:
        return array.astype(np.float64)
    if not 0 <= channel < array.shape[2]:
        raise InputError(f"{path} has {array.shape[2]} channels, counted from 0; there is no channel {channel}.")
    return array[:, :, channel].astype(np.float64)


def _count_times(rows: int, start: str | None, step: float | int | None, path: Path) -> np.ndarray:
    """Times of a file that has none."""
    if start is None or step is None:
        warnings.warn(
            f"{path} has no times: its rows are taken as {step or 5:g}-minute steps from {start or METR_LA_START}; "
            "say otherwise with start= and step=.",
            SensitivityWarning,
            stacklevel=3,
        )
    try:
        first = np.datetime64(start or METR_LA_START).astype("datetime64[ns]")
    except ValueError as error:
        raise InputError(f"start is {start!r}, but must be a time such as 2012-03-01T00:00.") from error
    minutes = 5.0 if step is None else step
    if not minutes > 0:
        raise InputError(f"step is {step!r} minutes, but must be positive.")
    return first + np.arange(rows) * np.timedelta64(round(minutes * 60e9), "ns")


def _warn(values: np.ndarray, path: Path) -> None:
    """Says what the reader of the data should know."""
    nan = int(np.isnan(values).sum())
    if nan:
        text = f"{path} has {nan} NaN values ({100 * nan / values.size:.2f} %): they count as missing, like zeros."
        warnings.warn(text, SensitivityWarning, stacklevel=3)
    highest = float(np.nanmax(values))
    if highest > HIGHEST:
        text = f"{path} has values up to {highest:g}: these are no speeds in mph; choose a channel or convert them."
        warnings.warn(text, SensitivityWarning, stacklevel=3)


def _with_own_graph(traffic: Traffic, path: Path) -> Traffic:
    """The graph that :func:`write` stored beside the speeds, if there is one."""
    if path.suffix.lower() != ".npz":
        return traffic
    with np.load(path, allow_pickle=False) as file:
        own = "graph" in file
    return dataclasses.replace(traffic, graph=read_graph(path, traffic.sensor_ids)) if own else traffic
