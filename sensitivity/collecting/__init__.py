"""What is kept of a measurement while its rows stream by: whole maps, or the sums behind their statistics."""

from sensitivity.collecting.maps import KeptMaps, Weights
from sensitivity.collecting.masks import Masks
from sensitivity.collecting.progress import watched
from sensitivity.collecting.rows import choose_rows
from sensitivity.collecting.sums import KeptSums
from sensitivity.collecting.weights import DeferredWeights

__all__ = ["DeferredWeights", "KeptMaps", "KeptSums", "Masks", "Weights", "choose_rows", "watched"]
