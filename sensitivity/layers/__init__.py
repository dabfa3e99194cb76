"""Layers of spatio-temporal models: attention over time, regularisers of its diagonal, positions, graph convolution."""

from sensitivity.layers.diagonal import (
    Diagonal,
    DiagonalDropout,
    DiagonalMask,
    DiagonalPenalty,
    diagonal_from_config,
)
from sensitivity.layers.positional import time_encoding
from sensitivity.layers.spatial import (
    SPATIAL,
    AdaptiveMixing,
    DistanceMixing,
    NodeScaling,
    propagate,
    row_normalised,
    spatial_layer,
)
from sensitivity.layers.temporal import Draw, TemporalAttention

__all__ = [
    "SPATIAL",
    "AdaptiveMixing",
    "Diagonal",
    "DiagonalDropout",
    "DiagonalMask",
    "DiagonalPenalty",
    "DistanceMixing",
    "Draw",
    "NodeScaling",
    "TemporalAttention",
    "diagonal_from_config",
    "propagate",
    "row_normalised",
    "spatial_layer",
    "time_encoding",
]
