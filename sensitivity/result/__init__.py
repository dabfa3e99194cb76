"""What a measurement returns: labelled sensitivity maps with their statistics, kept as netCDF."""

from sensitivity.result.map import SensitivityMap

__all__ = ["SensitivityMap"]
