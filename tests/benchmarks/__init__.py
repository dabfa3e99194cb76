"""Benchmarks: what measuring and training cost, beside the alternatives, in the same run."""
