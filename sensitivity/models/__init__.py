"""The time-and-space forecaster, comparators and naive forecasts."""

from sensitivity.models.forecaster import VARIANTS, Block, Forecaster, variant_diagonal

__all__ = ["VARIANTS", "Block", "Forecaster", "variant_diagonal"]
