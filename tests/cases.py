"""Attention layers as data: every mask, bias and multiplier that a closed form must be right for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from oracles import draw
from torch import Tensor

from sensitivity.attention import SoftmaxAttention

SAMPLES, LENGTH, DIM = 2, 6, 24
HEADS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Case:
    """One attention layer and its tokens."""

    name: str
    attention: SoftmaxAttention
    tokens: Tensor


def _padding() -> Tensor:
    padding = torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)
    padding[0, :2], padding[1, -1] = True, True  # left and right
    return padding


def _options(heads: int) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(heads)
    kept = torch.rand(SAMPLES, heads, LENGTH, LENGTH, generator=generator) < 0.7
    return {
        "plain": {},
        "biased": {"biases": True},
        "causal": {"causal": True, "biases": True},
        "padding": {"padding": _padding(), "biases": True},
        "causal padding": {"padding": _padding(), "causal": True},
        "penalty": {"diagonal_bias": -0.7},
        "penalty per head": {"diagonal_bias": torch.linspace(-2, 1, heads, dtype=torch.float64), "biases": True},
        "length penalty": {"diagonal_bias": -0.4, "diagonal_length": 3, "biases": True},
        "causal length penalty": {"diagonal_bias": 0.4, "diagonal_length": 9, "causal": True, "padding": _padding()},
        "gate": {"residual": -0.6, "biases": True},
        "mask": {"diagonal_bias": -math.inf, "biases": True},
        "causal mask": {"diagonal_bias": -math.inf, "causal": True},
        "bias": {"bias": draw(SAMPLES, heads, LENGTH, LENGTH, seed=heads), "biases": True},
        "shared bias": {"bias": draw(LENGTH, LENGTH, seed=heads)},
        "multiplier": {"multiplier": kept.double() / 0.7, "biases": True},
        "causal multiplier": {"multiplier": kept.double() / 0.7, "causal": True},
        "no residual": {"residual": False, "biases": True},
        "scaled": {"scale": 0.2},
        "sharp": {"gain": 4.0},
    }


def attention_cases() -> list[Case]:
    """Every kind of layer at every number of heads, in float64."""
    return [
        Case(
            f"{name}, {heads} heads",
            SoftmaxAttention.random(DIM, heads, seed=heads, dtype=torch.float64, **options),
            draw(SAMPLES, LENGTH, DIM, seed=100 + heads),
        )
        for heads in HEADS
        for name, options in _options(heads).items()
    ]


def shaped(
    dim: int, heads: int, width: int, value_width: int, out: int | None = None, seed: int = 0, **options
) -> SoftmaxAttention:
    """A layer whose widths are all its own."""

    def weights(*shape: int, part: int) -> torch.Tensor:
        return draw(*shape, seed=10 * seed + part) / math.sqrt(dim)

    return SoftmaxAttention(
        query_weight=weights(heads, width, dim, part=1),
        key_weight=weights(heads, width, dim, part=2),
        value_weight=weights(heads, value_width, dim, part=3),
        output_weight=weights(heads, out or dim, value_width, part=4),
        value_bias=weights(heads, value_width, part=5),
        key_bias=weights(heads, width, part=6),
        **options,
    )
