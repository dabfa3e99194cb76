"""The time-and-space forecaster, comparators and naive forecasts."""

from sensitivity.models.comparators import (
    COMPARATORS,
    AttentionEncoder,
    ConvolutionEncoder,
    RecurrentEncoder,
    comparator,
)
from sensitivity.models.forecaster import VARIANTS, Block, Forecaster, variant_diagonal

__all__ = [
    "COMPARATORS",
    "VARIANTS",
    "AttentionEncoder",
    "Block",
    "ConvolutionEncoder",
    "Forecaster",
    "RecurrentEncoder",
    "comparator",
    "variant_diagonal",
]
