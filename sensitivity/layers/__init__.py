"""Temporal attention with diagonal regularisers, positional encodings, graph convolution."""
