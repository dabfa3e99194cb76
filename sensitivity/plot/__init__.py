"""Figures: one file each; every function takes ax=None and returns the Axes."""
