"""Training: the Lightning module, masked metrics."""
