"""Road graphs: from files, without running foreign code, and from road distances."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.traffic.files import check_file, reason

THRESHOLD = 0.1
"""Weights below this are set to 0, as in METR-LA's published graph."""


def gaussian_kernel(distances: np.ndarray, threshold: float = THRESHOLD) -> np.ndarray:
    """Edge weights ``exp(-(distance / std)^2)`` of directed road distances, as METR-LA's graph was built.

    Args:
        distances: ``(node, node)``, from row to column; infinite where no road is listed.
        threshold: smaller weights become 0.

    Returns:
        ``(node, node)`` float32; std is that of the finite distances (1 if they do not vary).
    """
    finite = distances[np.isfinite(distances)]
    std = float(finite.std()) or 1.0
    weights = np.exp(-np.square(distances / std))
    return np.where(weights < threshold, 0, weights).astype(np.float32)


def read_graph(path: str | os.PathLike[str], sensor_ids: list[str], named: bool = True) -> Float32[Tensor, "node node"]:
    """The graph of ``sensor_ids``, in their order.

    Args:
        path: ``adj_mx.pkl`` (ids, id to index, matrix), or a bare matrix as .npy, .npz, .csv or .pkl; a CSV with the
            header ``from,to,cost`` is a list of road distances, which :func:`gaussian_kernel` turns into weights.
        sensor_ids: sensors of the data.
        named: False if the data has no ids of its own; then the graph's order is taken to be the data's.

    Raises:
        InputError: a file that cannot be read, wants to run code, is no square matrix of finite weights >= 0, or does
            not have the data's sensors.
    """
    path = Path(path)
    ids, matrix = _load(check_file(path, "the graph"), sensor_ids)
    matrix = np.asarray(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.dtype.kind not in "fiub":
        raise InputError(f"{path} holds an array of shape {matrix.shape} and type {matrix.dtype}, not a square matrix.")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise InputError(f"{path} holds weights that are negative or not finite; a graph's weights are >= 0.")
    if ids is None or (not named and len(ids) == len(sensor_ids)):
        if len(matrix) != len(sensor_ids):
            raise InputError(
                f"{path} has {len(matrix)} nodes without ids, but the data has {len(sensor_ids)} sensors; give the "
                "graph of these sensors, or one with ids."
            )
        return torch.from_numpy(matrix.astype(np.float32))
    absent = [name for name in sensor_ids if name not in ids]
    if absent:
        raise InputError(
            f"{path} lacks {len(absent)} of the data's {len(sensor_ids)} sensors (the first is {absent[0]!r}; its own "
            f"ids look like {next(iter(ids), '')!r}); give the graph that belongs to this data."
        )
    rows = [ids[name] for name in sensor_ids]
    return torch.from_numpy(matrix[np.ix_(rows, rows)].astype(np.float32))


def _load(path: Path, sensor_ids: list[str]) -> tuple[dict[str, int] | None, Any]:
    """Ids (or None) and matrix of any kind of graph file."""
    suffix = path.suffix.lower()
    if suffix in (".pkl", ".pickle"):
        return _from_pickle(path)
    try:
        if suffix == ".npy":
            return None, np.load(path, allow_pickle=False)
        if suffix == ".npz":
            return _from_npz(path)
        if suffix in (".csv", ".txt"):
            return _from_csv(path, sensor_ids)
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read as a graph ({reason(error)}).") from error
    raise InputError(f"{path} is no graph that can be read: its name must end in .pkl, .npy, .npz or .csv.")


def _from_npz(path: Path) -> tuple[dict[str, int] | None, Any]:
    with np.load(path, allow_pickle=False) as file:
        key = next((name for name in ("graph", "adjacency", "adj_mx", "adj", "A") if name in file), None)
        if key is None and len(file.files) != 1:
            raise InputError(
                f"{path} holds {', '.join(file.files) or 'nothing'}; a graph is called 'graph' or 'adj_mx'."
            )
        ids = {str(name): row for row, name in enumerate(file["sensor_ids"])} if "sensor_ids" in file else None
        return ids, file[key or file.files[0]]


def _from_csv(path: Path, sensor_ids: list[str]) -> tuple[dict[str, int] | None, Any]:
    with path.open(encoding="utf-8-sig") as file:
        header = [part.strip().lower() for part in file.readline().split(",")]
        if header[:2] != ["from", "to"]:
            return None, np.loadtxt(path, delimiter=",", ndmin=2)
        ids = {name: row for row, name in enumerate(sensor_ids)}
        distances = np.full((len(ids), len(ids)), np.inf)
        known: set[str] = set()
        for line in file:
            start, stop, cost = (part.strip() for part in line.split(",")[:3])
            known.update((start, stop))
            if start in ids and stop in ids:
                distances[ids[start], ids[stop]] = float(cost)
        return {name: row for name, row in ids.items() if name in known}, gaussian_kernel(distances)


def _from_pickle(path: Path) -> tuple[dict[str, int] | None, Any]:
    """``[ids, id -> index, matrix]``, or a bare matrix."""
    with path.open("rb") as file:
        try:
            content = _Unpickler(file, encoding="latin1").load()
        except InputError:
            raise
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise InputError(f"{path} is not a complete pickle ({reason(error)}).") from error
    if isinstance(content, np.ndarray):
        return None, content
    if not (isinstance(content, list | tuple) and len(content) == 3 and isinstance(content[2], np.ndarray)):
        raise InputError(f"{path} holds a {type(content).__name__}, not METR-LA's [ids, id to index, matrix].")
    names, index, matrix = content
    ids = {_name(name): row for row, name in enumerate(names)}
    if len(ids) != len(matrix) or {_name(name): row for name, row in index.items()} != ids:
        raise InputError(f"{path} contradicts itself: {len(ids)} ids, {len(index)} indices, {len(matrix)} matrix rows.")
    return ids, matrix


def _name(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _latin1(text: str, codec: str) -> bytes:
    """What Python-3 pickles of protocol 2 use for bytes; any other codec is refused."""
    if codec != "latin1":
        raise pickle.UnpicklingError(f"codec {codec!r} is not read")
    return text.encode("latin1")


def _frombuffer(
    buffer: bytes | bytearray, dtype: np.dtype, shape: tuple[int, ...], order: Literal["C", "F"]
) -> np.ndarray:
    """What NumPy pickles contiguous arrays with."""
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


class _Unpickler(pickle.Unpickler):
    """Reads lists, dicts, text, numbers and NumPy arrays; refuses every other class and function."""

    def find_class(self, module: str, name: str) -> Any:
        """The few constructors of arrays; nothing else is ever looked up.

        Raises:
            InputError: naming what the pickle wants to run.
        """
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.array([0]).__reduce__()[0]
        if name == "_frombuffer" and module in ("numpy.core.numeric", "numpy._core.numeric"):
            return _frombuffer
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        return self._refuse(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> NoReturn:
        """Never needed by a graph."""
        self._refuse(f"persistent object {identity!r}")

    def _refuse(self, what: str) -> NoReturn:
        raise InputError(
            f"the pickle asks for {what}, which could run foreign code, so it was not loaded; only lists, dicts and "
            "arrays are read: write the matrix as .npy or .npz instead."
        )
