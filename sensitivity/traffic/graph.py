"""Road graphs: from files, without running foreign code, and from road distances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.traffic.edges import read_edges
from sensitivity.traffic.files import check_file, reason
from sensitivity.traffic.pickles import read_pickle

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


def read_graph(path: Any, sensor_ids: list[str], named: bool = True) -> Float32[Tensor, "node node"]:
    """The graph of ``sensor_ids``, in their order.

    ==================  =====================================================================================
    ``.pkl``            ``adj_mx.pkl``: ids, id to index, matrix; or a bare matrix
    ``.npy``            a matrix
    ``.npz``            a matrix named ``graph``, ``adj_mx`` or alone, ``sensor_ids`` if it has them; or a sparse
                        matrix of SciPy
    ``.csv``            a matrix, with or without ids in the first line and column; or a list of edges with the header
                        ``from,to,cost`` (road distances) or ``from,to,weight``; three columns without a header are
                        distances, as in PEMS-BAY's list
    ==================  =====================================================================================

    Distances become weights by :func:`gaussian_kernel`.

    Args:
        path: the file.
        sensor_ids: sensors of the data.
        named: False if the data has no ids of its own; then the graph's order is taken to be the data's.

    Raises:
        InputError: a file that cannot be read, wants to run code, is no square matrix of finite weights >= 0, or does
            not have the data's sensors.
    """
    path = check_file(path, "the graph")
    return select(*load_graph(path, sensor_ids), sensor_ids, named, path)


def select(
    ids: dict[str, int] | None, matrix: Any, sensor_ids: list[str], named: bool, path: Path
) -> Float32[Tensor, "node node"]:
    """The rows and columns of a loaded graph that belong to ``sensor_ids``; errors as in :func:`read_graph`."""
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


def load_graph(path: Path, sensor_ids: list[str]) -> tuple[dict[str, int] | None, Any]:
    """Ids (or None) and the whole matrix of any kind of graph file.

    Raises:
        InputError: a file that cannot be read, or wants to run code.
    """
    suffix = path.suffix.lower()
    if suffix in (".pkl", ".pickle"):
        return read_pickle(path)
    try:
        if suffix == ".npy":
            return None, np.load(path, allow_pickle=False)
        if suffix == ".npz":
            return _from_npz(path)
        if suffix in (".csv", ".txt", ".tsv"):
            return read_edges(path, sensor_ids, gaussian_kernel)
    except InputError:
        raise
    except Exception as error:  # zip, header and pickle errors are of many kinds
        raise InputError(f"{path} cannot be read as a graph ({reason(error)}).") from error
    raise InputError(f"{path} is no graph that can be read: its name must end in .pkl, .npy, .npz or .csv.")


def _from_npz(path: Path) -> tuple[dict[str, int] | None, Any]:
    with np.load(path, allow_pickle=False) as file:
        if {"format", "shape"} <= set(file.files):
            from scipy import sparse

            return None, sparse.load_npz(path).toarray()
        key = next((name for name in ("graph", "adjacency", "adj_mx", "adj", "A") if name in file), None)
        if key is None and len(file.files) != 1:
            raise InputError(
                f"{path} holds {', '.join(file.files) or 'nothing'}; a graph is called 'graph' or 'adj_mx'."
            )
        ids = {str(name): row for row, name in enumerate(file["sensor_ids"])} if "sensor_ids" in file else None
        return ids, file[key or file.files[0]]
