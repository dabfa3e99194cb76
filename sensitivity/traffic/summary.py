"""What a traffic file holds, in numbers: also of a file that cannot be used, and why it cannot."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.traffic.files import check_file, checksum
from sensitivity.traffic.graph import load_graph, select
from sensitivity.traffic.index import Regularity, regularity
from sensitivity.traffic.published import Published, identify
from sensitivity.traffic.readers import assembled, count_times, open_table
from sensitivity.traffic.table import Table
from sensitivity.traffic.windows import PARTS, PROTOCOLS, borders, target_rows


@dataclass(frozen=True)
class Gap:
    """A run of rows without a reading.

    Attributes:
        row: the first.
        length: how many.
        column: of the sensor, or None for a run in which no sensor has a reading.
    """

    row: int
    length: int
    column: int | None


@dataclass(frozen=True)
class Part:
    """One part of a split: its windows, and the share of missing readings in the rows its targets lie in."""

    protocol: str
    name: str
    windows: int
    missing: float


@dataclass(frozen=True)
class GraphSummary:
    """A graph among the data's sensors.

    Attributes:
        path: its file.
        nodes: of the file.
        named: whether the file has ids; if not, the order of the data is assumed.
        edges: non-zero entries, self-loops included.
        loops: non-zero entries on the diagonal.
        one_way: edges between two sensors whose way back is missing or has another weight.
        alone: sensors without an edge to or from another one.
        low: smallest non-zero weight, 0 without edges.
        high: greatest weight.
        published: title and file, if it is a published one.
    """

    path: Path
    nodes: int
    named: bool
    edges: int
    loops: int
    one_way: int
    alone: int
    low: float
    high: float
    published: tuple[str, Published] | None


@dataclass(frozen=True, eq=False)
class Summary:
    """What a traffic file holds.

    Attributes:
        path: the file.
        table: its content, unchecked.
        size: in bytes.
        sha256: its checksum.
        published: title and file, if it is a published one.
        timestamps: of the file, or counted where it has none.
        ids: of the file, or counted where it has none.
        valid: ``(time, node)``, True where there is a reading.
        index: how regular the times are; None with fewer than two, or one that is not a time.
        low: smallest reading.
        high: greatest reading.
        mean: of the readings.
        zeros: cells that are 0.
        nans: cells that are NaN.
        dead: ids of sensors without a reading.
        stuck: ids of sensors with one and the same reading (at least two times).
        gap: longest run without a reading at one sensor that has any, or None.
        silence: longest run without a reading at all sensors, or None.
        silent: rows without any reading.
        parts: of both protocols; empty if the file cannot be used.
        graph: of the data's sensors, or None.
        notes: what the reader of the file should know.
        fault: why the file cannot be used, or None.
    """

    path: Path
    table: Table
    size: int
    sha256: str
    published: tuple[str, Published] | None
    timestamps: np.ndarray
    ids: list[str]
    valid: Bool[np.ndarray, "time node"]
    index: Regularity | None
    low: float
    high: float
    mean: float
    zeros: int
    nans: int
    dead: list[str]
    stuck: list[str]
    gap: Gap | None
    silence: Gap | None
    silent: int
    parts: list[Part]
    graph: GraphSummary | None
    notes: list[str]
    fault: InputError | None


def summarise(path: Any, graph: Any = None, *, key: str | None = None, channel: int = 0) -> Summary:
    """Looks at a traffic file and its graph; arguments as those of :func:`sensitivity.traffic.read`.

    Raises:
        InputError: a file that cannot be opened. One that can, but cannot be used, is described, with the reason in
            ``fault``.
    """
    path = check_file(path, "the traffic data")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SensitivityWarning)
        table = open_table(path, key, channel)
        rows, columns = table.values.shape
        ids = table.names if table.names is not None else [str(node) for node in range(columns)]
        times = table.timestamps if table.timestamps is not None else count_times(rows, None, None, path)
        graph_summary, fault = _use(table, path, graph, ids, {"key": key, "channel": channel})
    valid = np.isfinite(table.values) & (table.values > 0)
    readings = table.values[valid]
    sha256 = checksum(path)
    dead, stuck = _dead_and_stuck(table.values, valid, ids)
    silent = ~valid.any(axis=1)
    return Summary(
        path, table, path.stat().st_size, sha256, identify(sha256), times, ids, valid,
        index=None if len(times) < 2 or np.isnat(times).any() else regularity(times),
        low=float(readings.min()) if len(readings) else 0.0,
        high=float(readings.max()) if len(readings) else 0.0,
        mean=float(readings.mean()) if len(readings) else 0.0,
        zeros=int((table.values == 0).sum()),
        nans=int(np.isnan(table.values).sum()),
        dead=dead, stuck=stuck,
        gap=_longest(~valid[:, valid.any(axis=0)], np.flatnonzero(valid.any(axis=0))),
        silence=_longest(silent[:, None], None),
        silent=int(silent.sum()),
        parts=[] if fault is not None else _parts(valid),
        graph=graph_summary,
        notes=list(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, SensitivityWarning))),
        fault=fault,
    )  # fmt: skip


def _use(
    table: Table, path: Path, graph: Any, ids: list[str], options: dict[str, Any]
) -> tuple[GraphSummary | None, InputError | None]:
    """Tries to use what was read: the graph among its sensors, and why it cannot be used."""
    try:
        own = assembled(table, path, None, options | {"start": None, "step": None}).graph
        graph = path if graph is None and own is not None else graph
        return (None if graph is None else _graph(graph, ids, table.names is not None)), None
    except InputError as error:
        return None, error


def _graph(path: Any, ids: list[str], named: bool) -> GraphSummary:
    path = check_file(path, "the graph")
    index, whole = load_graph(path, ids)
    matrix = select(index, whole, ids, named, path).numpy()
    edges, loops = matrix != 0, np.diag(matrix) != 0
    others = edges & ~np.eye(len(matrix), dtype=bool)
    weights = matrix[edges]
    return GraphSummary(
        path,
        nodes=len(np.asarray(whole)),
        named=index is not None,
        edges=int(edges.sum()),
        loops=int(loops.sum()),
        one_way=int((others & (matrix != matrix.T)).sum()),
        alone=int((~(others | others.T).any(axis=1)).sum()),
        low=float(weights.min()) if len(weights) else 0.0,
        high=float(weights.max()) if len(weights) else 0.0,
        published=identify(checksum(path)),
    )


def _dead_and_stuck(values: np.ndarray, valid: np.ndarray, ids: list[str]) -> tuple[list[str], list[str]]:
    """Sensors without a reading, and those that always read the same."""
    counts = valid.sum(axis=0)
    low = np.where(valid, values, np.inf).min(axis=0)
    high = np.where(valid, values, -np.inf).max(axis=0)
    same = (counts > 1) & (low == high)
    return [ids[column] for column in np.flatnonzero(counts == 0)], [ids[column] for column in np.flatnonzero(same)]


def _longest(missing: np.ndarray, columns: np.ndarray | None) -> Gap | None:
    """The longest run of True along the rows of any column; ``columns`` are their places in the file."""
    edges = np.diff(missing.astype(np.int8), axis=0, prepend=0, append=0)
    starts, ends = np.argwhere(edges.T > 0), np.argwhere(edges.T < 0)
    if not len(starts):
        return None
    lengths = ends[:, 1] - starts[:, 1]
    place = int(lengths.argmax())
    column, row = (int(part) for part in starts[place])
    return Gap(row, int(lengths[place]), None if columns is None else int(columns[column]))


def _parts(valid: np.ndarray, input_length: int = 12, horizon: int = 12) -> list[Part]:
    """The parts of both splits; none for a protocol that the file is too short for."""
    found = []
    for protocol in PROTOCOLS:
        try:
            split = borders(len(valid), protocol, input_length, horizon)
        except InputError:
            continue
        for name, part in zip(PARTS, (split.train, split.validation, split.test), strict=False):
            targets = valid[target_rows(part, input_length, horizon)]
            found.append(Part(protocol, name, part[1], 1 - float(targets.mean())))
    return found
