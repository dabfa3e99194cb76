"""Slow, independent truths that the engines are compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Function = Callable[[Tensor], Tensor]


def dense_jacobian(function: Function, tokens: Tensor) -> Tensor:
    """Every derivative by one ``torch.autograd.grad`` per output element, ``(sample, query, key, out, in)``.

    Each sample's block is taken from the whole batch, so that batch statistics count; the influence of one sample on
    another is left out.
    """
    inputs = tokens.detach().clone().requires_grad_(True)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        output = function(inputs.clone())  # a function may write into what it is given
        samples, length_out, out = output.shape
        blocks = torch.zeros(samples, length_out, inputs.shape[1], out, inputs.shape[2], dtype=tokens.dtype)
        for sample in range(samples):
            for query in range(length_out):
                for part in range(out):
                    (row,) = torch.autograd.grad(
                        output[sample, query, part], inputs, retain_graph=True, allow_unused=True
                    )
                    if row is not None:
                        blocks[sample, query, :, part, :] = row[sample]
    return blocks


def finite_differences(function: Function, tokens: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences, ``(sample, query, key, out, in)``; error about ``step ** 2``. Use float64."""
    tokens = tokens.detach()
    columns = []
    with torch.no_grad():
        for key in range(tokens.shape[1]):
            for feature in range(tokens.shape[2]):
                shift = torch.zeros_like(tokens)
                shift[:, key, feature] = step
                columns.append((function(tokens + shift) - function(tokens - shift)) / (2 * step))
    stacked = torch.stack(columns).unflatten(0, (tokens.shape[1], tokens.shape[2]))
    return stacked.permute(2, 3, 0, 4, 1)


def norm_map(function: Function, tokens: Tensor, norm: str = "frobenius") -> Tensor:
    """Norms of the dense oracle's blocks, ``(sample, query, key)``."""
    blocks = dense_jacobian(function, tokens)
    if norm == "spectral":
        return torch.linalg.matrix_norm(blocks, ord=2)
    frobenius = torch.linalg.vector_norm(blocks, dim=(-2, -1))
    return frobenius / tokens.shape[-1] ** 0.5 if norm == "rms" else frobenius


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers from a generator of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
