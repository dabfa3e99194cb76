r"""The pointwise end of a function: what comes after the last mixing of times, such as a head or a feed-forward layer.

If every path from the output to the tokens leads through one tensor ``z``, and the output at a time depends on ``z`` at
that time only, then :math:`J_{ij} = P_i\, \partial z_i / \partial x_j`. The factors :math:`P_i` of all times come from
one backward pass per output feature, instead of one per output feature and time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sensitivity.jacobian.shared import vmapped

_PATIENCE = 3  # tensors on every path that may turn out to come before a mixing of times


@dataclass(frozen=True)
class Tail:
    """A pointwise end.

    Attributes:
        entry: the tensor ``z`` before it.
        factors: the derivatives ``P`` of the output with respect to ``z`` at the same time.
    """

    entry: Float[Tensor, "sample time width"]
    factors: Float[Tensor, "out sample time width"]

    def pulled_back(
        self, queries: Int[Tensor, " row"], vectors: Float[Tensor, "row out"]
    ) -> Float[Tensor, "row sample width"]:
        """``v^T P_i``, row by row."""
        parts = [
            torch.einsum("ro,osw->rsw", vectors[queries == query], self.factors[:, :, query])
            for query in queries.unique_consecutive().tolist()
        ]
        return torch.cat(parts)


class Watch(TorchFunctionMode):
    """Collects the results ``(sample, time, feature)`` of torch's functions, in their order."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = torch.Size(shape)
        self.seen: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the function and looks at what comes back."""
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.requires_grad and value.ndim == 3 and value.shape[:2] == self.shape:
                self.seen.append(value)
        return result


def find_tail(
    output: Float[Tensor, "sample time out"],
    leaf: Float[Tensor, "sample key in"],
    seen: Sequence[Tensor],
    limit: int,
    chunk: int,
) -> Tail | None:
    """The earliest of the tensors that were seen after which the function is pointwise; None if that is the output.

    That every path leads through a tensor is read off autograd's graph; that the rest is pointwise, off derivatives
    along random directions, which must be exactly zero at every other time.

    Args:
        output: the function's output, as long as its input.
        leaf: its input.
        seen: results on the way, in their order.
        limit: bytes that the factors may take.
        chunk: rows per backward pass.
    """
    if output.grad_fn is None or output.shape[:2] != leaf.shape[:2]:
        return None
    length, out = output.shape[1:]
    good: list[Tensor] = []
    failures = 0
    for value in reversed(seen):
        fits = out * value.numel() * value.element_size() <= limit
        if fits and value.grad_fn is not output.grad_fn and _on_every_path(value, output, leaf):
            if _pointwise(output, value, [length // 2, length - 1], chunk):
                good.append(value)
            else:
                failures += 1
        if failures == _PATIENCE:
            break
    for value in reversed(good):
        if _pointwise(output, value, range(length), chunk):
            return Tail(value, _factors(output, value, chunk))
    return None


def _on_every_path(value: Tensor, output: Tensor, leaf: Tensor) -> bool:
    """Whether no path of autograd's graph leads from the output to the leaf around the value."""
    door = (value.grad_fn, value.output_nr)
    waiting, known = [(output.grad_fn, output.output_nr)], set()
    while waiting:
        node, _ = edge = waiting.pop()
        if node is None or edge == door or node in known:
            continue
        if getattr(node, "variable", None) is leaf:
            return False
        known.add(node)
        waiting.extend(node.next_functions)
    return True


def _pointwise(output: Tensor, value: Tensor, times: Sequence[int], chunk: int) -> bool:
    """Whether the output at each of these times depends on the value at that time only."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(output.shape[1:], generator=generator, dtype=torch.float64).to(output)
    every = torch.arange(output.shape[1], device=output.device)
    for some in torch.tensor(list(times), device=output.device).split(chunk):
        cotangents = output.new_zeros(len(some), *output.shape)
        cotangents[every[: len(some)], :, some] = directions[some, None]
        rows = vmapped(output, value, cotangents).transpose(1, 2)
        if rows[every != some[:, None]].count_nonzero() > 0:
            return False
    return True


def _factors(output: Tensor, value: Tensor, chunk: int) -> Float[Tensor, "out sample time width"]:
    every = torch.eye(output.shape[-1], dtype=output.dtype, device=output.device)[:, None, None]
    return torch.cat([vmapped(output, value, some.expand(-1, *output.shape)) for some in every.split(chunk)])
