"""Random and extreme attention layers with tokens to match, for claims that must hold on all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sensitivity import SoftmaxAttention

GAINS = (0.0, 0.3, 1.0, 3.0, 10.0, 100.0)  # of query and key weights: logits vary from nothing to one hot
LENGTHS = (1, 2, 3, 5, 8, 16, 33, 64, 128)


def draw(
    generator: torch.Generator, dtype: torch.dtype, blocks: int = 20_000, lengths: tuple[int, ...] = LENGTHS
) -> tuple[SoftmaxAttention, Tensor]:
    """A layer of one to eight heads with any mask, bias, penalty or multiplier, and tokens of any size and correlation.

    Args:
        generator: of every choice.
        dtype: of layer and tokens.
        blocks: about how many blocks of the Jacobian there are.
        lengths: T is one of these.
    """

    def choose(values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    heads, width = choose(range(1, 9)), choose(range(1, 9))
    length, dim = choose(lengths), heads * width
    samples = max(1, blocks // length**2)
    options = {"causal": choose((True, False, False))}
    if choose((True, False, False)):
        options["diagonal_bias"] = choose((-math.inf, -3.0, 5.0, -1e4, torch.linspace(-4, 4, heads).to(dtype)))
        options["diagonal_length"] = choose((None, None, 2, 40))
    if choose((True, False, False, False)):
        shape = (choose((1, heads)), length, length)
        options["bias"] = (choose((1, 30)) * torch.randn(shape, generator=generator)).to(dtype)
    if choose((True, False, False, False)) and length > 2:
        padding = torch.zeros(samples, length, dtype=torch.bool)
        padding[:, choose(range(2, length)) :] = True
        options["padding"] = padding
    if choose((True,) + 5 * (False,)):
        kept = torch.rand(samples, heads, length, length, generator=generator) > 0.3
        options["multiplier"] = (kept / 0.7).to(dtype)
    seed, gain = choose(range(10**6)), choose(GAINS)
    layer = SoftmaxAttention.random(
        dim,
        heads,
        seed,
        choose((True, False, 0.3, -2.0)),
        biases=choose((True, False)),
        gain=gain,
        dtype=dtype,
        **options,
    )
    return layer, _tokens(choose(range(5)), samples, length, dim, generator).to(dtype)


def _tokens(kind: int, samples: int, length: int, dim: int, generator: torch.Generator) -> Tensor:
    tokens = torch.randn(samples, length, dim, generator=generator, dtype=torch.float64)
    if kind == 1:
        return torch.nn.functional.layer_norm(tokens, (dim,))
    if kind == 2:
        return 10 * tokens + 5
    if kind == 3:
        return 1e-3 * tokens
    return tokens.cumsum(dim=1) if kind == 4 else tokens
