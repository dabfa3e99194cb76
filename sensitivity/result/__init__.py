"""What a measurement returns: maps or statistics, labelled, kept as netCDF."""

from sensitivity.result.map import SensitivityMap
from sensitivity.result.measurement import Measurement
from sensitivity.result.statistics import SensitivityStatistics

__all__ = ["Measurement", "SensitivityMap", "SensitivityStatistics"]
