"""The layers and models that are measured, and their tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sensitivity.layers import TemporalAttention
from sensitivity.models import ConvolutionEncoder

Function = Callable[[Tensor], Tensor]


class Recurrent(nn.Module):
    """A recurrent network that hands on its states only."""

    def __init__(self, kind: type[nn.RNNBase], dim: int) -> None:
        super().__init__()
        self.cell = kind(dim, dim, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.cell(tokens)[0]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """What ``make`` builds, in evaluation and frozen, with weights from a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)


def attention(dim: int, heads: int) -> nn.Module:
    """One attention layer with residual."""
    return seeded(lambda: TemporalAttention(dim, heads))


def transformer(dim: int, layers: int = 2) -> nn.Module:
    """The stock encoder."""
    layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "TransformerEncoder, 2 layers": transformer,
    "LSTM": lambda dim: Recurrent(nn.LSTM, dim),
    "GRU": lambda dim: Recurrent(nn.GRU, dim),
    "TCN, 4 blocks of kernel 3": lambda dim: ConvolutionEncoder(dim, depth=4, kernel=3),
}


def model(name: str, dim: int) -> nn.Module:
    """One of :data:`MODELS`."""
    return seeded(lambda: MODELS[name](dim))


def tokens(length: int, dim: int, samples: int = 1) -> Tensor:
    """Standard normal tokens, ``(sample, time, feature)``."""
    return torch.randn(samples, length, dim, generator=torch.Generator().manual_seed(1))


def single(module: nn.Module) -> Function:
    """The module on one sequence ``(time, feature)``, with the attention kernel that can be differentiated in batches.

    The fused kernel has no batching rule: with it the alternatives run row by row, several times slower.
    """

    def function(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return module(x[None])[0]

    return function
