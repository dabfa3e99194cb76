"""The time-and-space forecasters, comparators and naive forecasts."""

from sensitivity.models.comparators import (
    COMPARATORS,
    AttentionEncoder,
    ConvolutionEncoder,
    RecurrentEncoder,
    comparator,
)
from sensitivity.models.forecaster import Block, Forecaster
from sensitivity.models.staeformer import STAEformer
from sensitivity.models.variants import PUBLISHED, VARIANTS, variant_diagonal

BACKBONES = {"forecaster": Forecaster, "staeformer": STAEformer}
"""Forecasters by name."""

__all__ = [
    "BACKBONES",
    "COMPARATORS",
    "PUBLISHED",
    "VARIANTS",
    "AttentionEncoder",
    "Block",
    "ConvolutionEncoder",
    "Forecaster",
    "RecurrentEncoder",
    "STAEformer",
    "comparator",
    "variant_diagonal",
]
