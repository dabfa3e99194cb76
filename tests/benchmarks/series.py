"""How cost grows: what is measured, along which axis, at which sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import sensitivity
from benchmarks.subjects import attention, seeded, tokens
from benchmarks.timing import Job
from sensitivity.models import AttentionEncoder


@dataclass(frozen=True)
class Series:
    """One quantity over one size, all others fixed.

    Attributes:
        what: what runs.
        axis: the size that grows: T, D, H, samples or depth.
        values: of the axis, for times.
        fixed: the other sizes, in words.
        job: makes the job of one value.
        held: values for memory, where a larger one is needed to be seen; None takes ``values``.
    """

    what: str
    axis: str
    values: tuple[int, ...]
    fixed: str
    job: Callable[[int], Job]
    held: tuple[int, ...] | None = None


def forward(length: int = 1024, dim: int = 64, heads: int = 4) -> Job:
    """The layer's own forward pass."""
    layer, data = attention(dim, heads), tokens(length, dim)
    return torch.no_grad()(lambda: layer(data))


def closed_map(length: int = 1024, dim: int = 64, heads: int = 4, samples: int = 1) -> Job:
    """The closed-form map."""
    layer, data = attention(dim, heads), tokens(length, dim, samples)
    return lambda: sensitivity.measure(layer, data)


def summed(length: int = 1024, dim: int = 64, heads: int = 4) -> Job:
    """The closed form's statistics without a map."""
    layer, data = attention(dim, heads), tokens(length, dim)
    return lambda: sensitivity.measure(layer, data, keep="statistics")


def generic(length: int = 32, dim: int = 32, heads: int = 4, depth: int = 2, samples: int = 1) -> Job:
    """The generic engine on a stack of attention layers."""
    stack, data = seeded(lambda: AttentionEncoder(dim, depth, heads)), tokens(length, dim, samples)
    return lambda: sensitivity.measure(stack, data)


_LAYER, _STACK = "one layer", "stack of attention layers"
SERIES = {
    "forward over T": Series("forward pass", "T", (512, 1024, 2048, 4096), "D=64, H=4", lambda T: forward(T)),
    "map over T": Series(
        "map", "T", (512, 1024, 2048, 4096), "D=64, H=4", lambda T: closed_map(T), held=(1024, 2048, 4096, 8192)
    ),
    "statistics over T": Series(
        "statistics", "T", (512, 1024, 2048, 4096), "D=64, H=4", lambda T: summed(T), held=(2048, 4096, 8192, 16384)
    ),
    "map over D": Series("map", "D", (32, 64, 128, 256), "T=1,024, H=4", lambda D: closed_map(dim=D)),
    "map over H": Series("map", "H", (2, 4, 8, 16), "T=1,024, D=64", lambda H: closed_map(heads=H)),
    "map over samples": Series(
        "map", "samples", (2, 4, 8, 16), "T=1,024, D=64, H=4", lambda samples: closed_map(samples=samples)
    ),
    "generic over T": Series("generic engine", "T", (16, 32, 64, 128), "D=32, H=4, depth 2", lambda T: generic(T)),
    "generic over D": Series("generic engine", "D", (16, 32, 64, 128), "T=32, H=4, depth 2", lambda D: generic(dim=D)),
    "generic over H": Series("generic engine", "H", (1, 2, 4, 8), "T=32, D=32, depth 2", lambda H: generic(heads=H)),
    "generic over depth": Series(
        "generic engine", "depth", (1, 2, 4, 8), "T=32, D=32, H=4", lambda depth: generic(depth=depth)
    ),
    "generic over samples": Series(
        "generic engine", "samples", (1, 2, 4, 8), "T=32, D=32, H=4, depth 2", lambda samples: generic(samples=samples)
    ),
}
