"""METR-LA and its kin: readers, windows, scaler, graph, synthetic city."""

from sensitivity.traffic.data import Traffic
from sensitivity.traffic.description import describe, reopen
from sensitivity.traffic.download import fetch
from sensitivity.traffic.draws import end_rows, sequences
from sensitivity.traffic.graph import gaussian_kernel, read_graph
from sensitivity.traffic.readers import read, write
from sensitivity.traffic.scaler import Scaler
from sensitivity.traffic.summary import Summary, summarise
from sensitivity.traffic.synthetic import synthetic_city
from sensitivity.traffic.windows import Borders, Split, Window, Windows, borders, inputs, split

__all__ = [
    "Borders",
    "Scaler",
    "Split",
    "Summary",
    "Traffic",
    "Window",
    "Windows",
    "borders",
    "describe",
    "end_rows",
    "fetch",
    "gaussian_kernel",
    "inputs",
    "read",
    "read_graph",
    "reopen",
    "sequences",
    "split",
    "summarise",
    "synthetic_city",
    "write",
]
