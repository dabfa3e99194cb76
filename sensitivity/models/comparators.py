"""Encoders to compare temporal attention with; each maps ``(sample, time, dim)`` to the same shape, for any length.

Their sensitivities have known shapes: a causal temporal convolution and causal attention favour the first tokens (the
number of paths from them grows with depth), a recurrent network the last.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from sensitivity.errors import InputError
from sensitivity.layers.temporal import TemporalAttention

COMPARATORS = ("attention", "causal-attention", "convolution", "gru")


class AttentionEncoder(nn.Module):
    """Post-norm blocks of attention only, ``h = LN(x + A(x))``, as in the forecaster but without nodes and clocks.

    Args:
        dim: features.
        depth: number of blocks.
        heads: attention heads; must divide ``dim``.
        causal: whether keys after the query are hidden.
    """

    def __init__(self, dim: int, depth: int = 2, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TemporalAttention(dim, heads, causal=causal) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))

    def forward(self, tokens: Float[Tensor, "sample time dim"]) -> Float[Tensor, "sample time dim"]:
        """The states after the last block."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            tokens = norm(layer(tokens))
        return tokens


class ConvolutionEncoder(nn.Module):
    """A causal temporal convolution: residual blocks of dilated kernels, dilation 1, 2, 4, ...

    Args:
        dim: features.
        depth: number of blocks; ``1 + (kernel - 1) (2^depth - 1)`` steps are seen.
        kernel: taps of each kernel.
    """

    def __init__(self, dim: int, depth: int = 2, kernel: int = 2) -> None:
        super().__init__()
        self.kernel = kernel
        self.layers = nn.ModuleList(nn.Conv1d(dim, dim, kernel, dilation=2**level) for level in range(depth))

    def forward(self, tokens: Float[Tensor, "sample time dim"]) -> Float[Tensor, "sample time dim"]:
        """The states after the last block; step i sees no later step."""
        states = tokens.transpose(1, 2)
        for level, layer in enumerate(self.layers):
            reach = (self.kernel - 1) * 2**level
            states = states + functional.gelu(layer(functional.pad(states, (reach, 0))))
        return states.transpose(1, 2)


class RecurrentEncoder(nn.Module):
    """A stack of gated recurrent units.

    Args:
        dim: features.
        depth: number of layers.
    """

    def __init__(self, dim: int, depth: int = 1) -> None:
        super().__init__()
        self.recurrence = nn.GRU(dim, dim, depth, batch_first=True)

    def forward(self, tokens: Float[Tensor, "sample time dim"]) -> Float[Tensor, "sample time dim"]:
        """The states of the last layer."""
        states: Tensor = self.recurrence(tokens)[0]
        return states


def comparator(kind: str, dim: int, depth: int = 2, heads: int = 4) -> nn.Module:
    """An encoder by name.

    Args:
        kind: one of ``COMPARATORS``.
        dim: features.
        depth: number of blocks or layers.
        heads: attention heads, where there are any.

    Raises:
        InputError: an unknown name, or heads that do not divide ``dim``.
    """
    if kind in ("attention", "causal-attention"):
        return AttentionEncoder(dim, depth, heads, causal=kind == "causal-attention")
    if kind == "convolution":
        return ConvolutionEncoder(dim, depth)
    if kind == "gru":
        return RecurrentEncoder(dim, depth)
    raise InputError(f"unknown comparator {kind!r}; known: {', '.join(COMPARATORS)}.")
