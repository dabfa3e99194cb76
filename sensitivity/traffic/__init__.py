"""METR-LA and its kin: readers, windows, scaler, graph, synthetic city."""
