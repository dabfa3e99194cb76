"""The time-and-space forecaster, comparators and naive forecasts."""
