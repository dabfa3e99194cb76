"""METR-LA and its kin: readers, windows, scaler, graph, synthetic city."""

from sensitivity.traffic.data import Traffic
from sensitivity.traffic.readers import read, write
from sensitivity.traffic.scaler import Scaler
from sensitivity.traffic.windows import Borders, Split, Window, Windows, borders, split

__all__ = ["Borders", "Scaler", "Split", "Traffic", "Window", "Windows", "borders", "read", "split", "write"]
