"""Layers of spatio-temporal models: attention over time, regularisers of its diagonal, positions, graph convolution."""

from sensitivity.layers.diagonal import (
    Diagonal,
    DiagonalDropout,
    DiagonalLearnedPenalty,
    DiagonalLengthPenalty,
    DiagonalMask,
    DiagonalPenalty,
    diagonal_from_config,
)
from sensitivity.layers.dropout import Dropout
from sensitivity.layers.gate import ResidualGate, residual_from_config
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
    "DiagonalLearnedPenalty",
    "DiagonalLengthPenalty",
    "DiagonalMask",
    "DiagonalPenalty",
    "DistanceMixing",
    "Draw",
    "Dropout",
    "NodeScaling",
    "ResidualGate",
    "TemporalAttention",
    "diagonal_from_config",
    "propagate",
    "residual_from_config",
    "row_normalised",
    "spatial_layer",
    "time_encoding",
]
