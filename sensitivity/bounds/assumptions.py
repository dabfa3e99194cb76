"""Assumptions of the bounds, tested on the layer and the tokens at hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.bounds.cloud import Ball

PERMUTATIONS = 199
DIRECTIONS = 16
LEVEL = 0.01
NORMALISED = 0.02


@dataclass(frozen=True)
class Assumption:
    """One assumption: whether it holds here, and the number that says so; true where it holds.

    Attributes:
        text: what is assumed, and what the number is.
        held: whether it holds.
        value: the number.
        required: whether the bound's reading rests on it; else it is worth knowing, no more.
    """

    text: str
    held: bool
    value: float
    required: bool = True

    def __bool__(self) -> bool:
        return self.held


def no_multiplier(attention: SoftmaxAttention) -> Assumption:
    """The weights of a row sum to one: no dropout multiplier after the softmax."""
    absent = attention.multiplier is None
    value = 0.0 if attention.multiplier is None else float((attention.multiplier - 1).abs().max())
    return Assumption("no multiplier after the softmax (largest |m - 1|)", absent, value)


def in_ball(ball: Ball) -> Assumption:
    """Always true of the tokens at hand; the number is the radius around their mean."""
    return Assumption("tokens in a ball (radius around their mean)", True, ball.radius)


def same_bias(prior: Float[Tensor, "#sample #head query key"], off: Bool[Tensor, "#sample query key"]) -> Assumption:
    """No bias tells the other keys of a row apart: the softmax of the biases alone is flat off the diagonal."""
    kept = (prior > 0) & off[:, None]
    high = torch.where(kept, prior, 0.0).amax(dim=-1)
    low = torch.where(kept, prior, torch.inf).amin(dim=-1)
    ratio = torch.where(torch.isfinite(low), high / low, 1.0)
    value = float(ratio.log().max())
    return Assumption("no bias tells the keys of a row apart (largest difference of logits)", value < 1e-6, value)


def normalised(tokens: Float[Tensor, "token dim"]) -> Assumption:
    """Tokens as a LayerNorm without gain leaves them, mean square 1 and mean 0: their ball is known beforehand."""
    off = (tokens.square().mean(dim=-1) - 1).abs().max()
    value = float(torch.maximum(off, tokens.mean(dim=-1).abs().max()))
    text = "tokens are layer-normalised (largest deviation of mean square from 1 or mean from 0)"
    return Assumption(text, value < NORMALISED, value, required=False)


def exchangeable(
    tokens: Float[Tensor, "sample time dim"], seen: Bool[Tensor, "sample time"], seed: int = 0
) -> Assumption:
    """Permutation test that the order of the tokens carries no information.

    Two statistics on random directions of the token space: the spread of the mean token over positions (positional
    encodings, trends common to all samples), and the likeness of neighbours (autocorrelation). Each is compared with
    its values under permutations of time within every sample, which is exact when the tokens are exchangeable.

    Returns:
        The assumption; its number is the p-value (the smaller of the two, doubled), and it holds above 0.01.
    """
    text = "tokens are exchangeable over time (p-value of a permutation test)"
    tokens = tokens[:, seen.all(dim=0)]
    samples, length, dim = tokens.shape
    if length < 3:
        return Assumption(text, True, 1.0)
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(dim, DIRECTIONS, generator=generator, dtype=tokens.dtype).to(tokens.device)
    values = tokens @ directions / dim**0.5
    values = values - values.mean(dim=1, keepdim=True)
    observed = _order_statistics(values)
    exceeded = torch.zeros(2, dtype=torch.long, device=tokens.device)
    for _ in range(PERMUTATIONS):
        order = torch.rand(samples, length, generator=generator).argsort(dim=1).to(tokens.device)
        shuffled = values.gather(1, order[..., None].expand_as(values))
        exceeded += _order_statistics(shuffled) >= observed * (1 - 1e-12)
    p_values = (1 + exceeded) / (1 + PERMUTATIONS)
    value = min(1.0, 2 * float(p_values.min()))
    return Assumption(text, value > LEVEL, value)


def _order_statistics(values: Float[Tensor, "sample time direction"]) -> Float[Tensor, "2"]:
    position = values.mean(dim=0).square().sum()
    neighbours = (values[:, 1:] * values[:, :-1]).sum()
    return torch.stack([position, neighbours])
