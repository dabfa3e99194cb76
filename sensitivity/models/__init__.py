"""The time-and-space forecaster, comparators and naive forecasts."""

from sensitivity.models.comparators import (
    COMPARATORS,
    AttentionEncoder,
    ConvolutionEncoder,
    RecurrentEncoder,
    comparator,
)
from sensitivity.models.forecaster import Block, Forecaster
from sensitivity.models.variants import PUBLISHED, VARIANTS, variant_diagonal

__all__ = [
    "COMPARATORS",
    "PUBLISHED",
    "VARIANTS",
    "AttentionEncoder",
    "Block",
    "ConvolutionEncoder",
    "Forecaster",
    "RecurrentEncoder",
    "comparator",
    "variant_diagonal",
]
