"""Many cotangents through one forward pass, by ``torch.vmap`` over the backward pass, where a function lets them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.jacobian.memory import SavedBytes, known_tensors
from sensitivity.jacobian.recurrent import Recurrences

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Shared:
    """What a vmapped backward pass through a function holds.

    Attributes:
        saved: bytes per sample that autograd keeps of the forward pass.
        widest: bytes per sample of the largest activation among them, which rows have a copy of each.
        stepwise: whether rows go back through a recurrent layer, a product of small matrices after the other, which
            want many rows.
    """

    saved: int
    widest: int
    stepwise: bool = False


def vmapped(
    output: Float[Tensor, "sample time out"],
    leaf: Float[Tensor, "sample key in"],
    cotangents: Float[Tensor, "row sample time out"],
    retain: bool = True,
) -> Float[Tensor, "row sample key in"]:
    """One row for every cotangent, in one backward pass; torch warns of operations that it loops over, slowly."""

    def one(cotangent: Tensor) -> Tensor:
        (row,) = torch.autograd.grad(output, leaf, cotangent, retain_graph=retain, allow_unused=True)
        return torch.zeros_like(leaf) if row is None else row

    return torch.func.vmap(one)(cotangents)


def shareable(function: Function, tokens: Float[Tensor, "sample time in"]) -> Shared | None:
    """Tries three random rows at once; None where an operation has no batching rule, or where a row comes out wrong.

    Call it inside ``exact_arithmetic``.
    """
    leaf = tokens.detach().clone().requires_grad_(True)
    try:
        with Recurrences() as recurrences, SavedBytes([*known_tensors(function, tokens), leaf]) as saved:
            output = function(leaf.clone())
        if not output.requires_grad:
            return None
        generator = torch.Generator().manual_seed(0)
        directions = torch.randn(3, *output.shape, generator=generator, dtype=torch.float64).to(output)
        (expected,) = torch.autograd.grad(output, leaf, directions[1], retain_graph=True)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            rows = vmapped(output, leaf, directions)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, AssertionError):
        return None  # whatever it is, the other engines meet it with one cotangent at a time and say what it is
    slow = any("batching rule" in str(warning.message) for warning in heard)
    off = (rows[1] - expected).abs().max()
    if slow or not bool(off <= 1000 * torch.finfo(leaf.dtype).eps * expected.abs().max()):
        return None
    return Shared(saved.total // tokens.shape[0], saved.largest // tokens.shape[0], recurrences.found)
