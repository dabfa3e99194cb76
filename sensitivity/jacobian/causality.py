"""Whether an output depends on later inputs, and where the first such dependence comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sensitivity import checks
from sensitivity.errors import InputError
from sensitivity.jacobian.guard import measuring
from sensitivity.jacobian.independence import check_output, explained
from sensitivity.modules import modules_of


@dataclass(frozen=True)
class Causality:
    """What a causality check found; true in a condition if the function is causal.

    Attributes:
        causal: whether no output depends on a later input.
        sample: the sample of the first leak.
        query: its output time, the earliest that depends on a later input.
        key: its input time, the earliest later one.
        size: norm of the derivative there, along a random direction, relative to the largest of that row.
        layer: the innermost submodule that first lets a later input in, if it could be told.
    """

    causal: bool
    sample: int | None = None
    query: int | None = None
    key: int | None = None
    size: float = 0.0
    layer: str | None = None

    def __bool__(self) -> bool:
        return self.causal

    def __str__(self) -> str:
        if self.causal:
            return "causal: no output depends on a later input."
        place = f"; the first layer that lets it in is {self.layer!r}" if self.layer is not None else ""
        return (
            f"not causal: the output at time {self.query} depends on the input at time {self.key} "
            f"(sample {self.sample}, {self.size:.2g} of the row's largest sensitivity){place}."
        )


def check_causality(function: Callable[[Tensor], Tensor], tokens: Tensor, tolerance: float | None = None) -> Causality:
    r"""Looks for :math:`\partial h_i / \partial x_j \ne 0` with :math:`j > i`, one backward pass per query time.

    The derivative is taken along one random direction of :math:`h_i`, which no fixed matrix but zero maps to zero (up
    to a set of probability 0). It catches masks that quietly become uniform attention, mixers and normalisation over
    time.

    Args:
        function: a module or callable from ``(sample, time, in)`` to ``(sample, time, out)``, of equal lengths.
        tokens: where to look.
        tolerance: what counts as zero, relative to the row's largest derivative; 100 units of rounding unless given.

    Returns:
        The first leak by query, then key, then sample, and the innermost submodule where it enters.

    Raises:
        InputError: a model in train mode, an output of another length, or what :func:`measuring` refuses.
    """
    tokens = checks.tokens(tokens).detach().clone()
    tolerance = 100 * torch.finfo(tokens.dtype).eps if tolerance is None else tolerance
    with measuring(function):
        leaf = tokens.requires_grad_(True)
        with _Watch(function) as watch:
            output = check_output(function(leaf.clone()), tokens)
        if output.shape[1] != tokens.shape[1]:
            raise InputError(
                f"causality compares equal times, but {tokens.shape[1]} steps go in and {output.shape[1]} come out."
            )
        leak = _first_leak(output, leaf, tolerance)
        if leak is None:
            return Causality(True)
        sample, query, key, size = leak
        return Causality(False, sample, query, key, size, watch.culprit(tolerance))


def _first_leak(output: Tensor, leaf: Tensor, tolerance: float) -> tuple[int, int, int, float] | None:
    """Sample, query, key and relative size of the first derivative with respect to a later input."""
    if not output.requires_grad:
        return None
    direction = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        output
    )
    for query in range(output.shape[1] - 1):
        try:
            (gradient,) = torch.autograd.grad(
                (output[:, query] * direction).sum(), leaf, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            raise explained(error) from error
        if gradient is None:
            continue
        sizes = torch.linalg.vector_norm(gradient, dim=-1)
        later = sizes[:, query + 1 :] > tolerance * sizes.amax(dim=1, keepdim=True)
        if later.any():
            key = int(later.any(dim=0).nonzero()[0])
            sample = int(later[:, key].nonzero()[0])
            relative = float(sizes[sample, query + 1 + key] / sizes[sample].max())
            return sample, query, query + 1 + key, relative
    return None


class _Watch:
    """Inputs and outputs of the submodules in the order in which they finish, inner ones first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.names = {part: name for module in modules_of(function) for name, part in module.named_modules()}
        self.seen: list[tuple[str, Tensor, Tensor]] = []
        self.handles: list[Any] = []

    def __enter__(self) -> _Watch:
        for part, name in self.names.items():
            if getattr(part, "batch_first", True):
                self.handles.append(part.register_forward_hook(self._hook(name), with_kwargs=True))
        return self

    def __exit__(self, *details: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            before = next(_sequences((args, kwargs)), None)
            after = next(_sequences(output), None)
            if before is not None and after is not None and before.shape[:-1] == after.shape[:-1]:
                self.seen.append((name, before, after))

        return keep

    def culprit(self, tolerance: float) -> str | None:
        """The first submodule to finish whose own output depends on a later part of its own input."""
        for name, before, after in self.seen:
            if before.requires_grad and after.requires_grad and before is not after:
                try:
                    leak = _first_leak(after, before, tolerance)
                except RuntimeError:
                    continue
                if leak is not None:
                    return name or None
        return None


def _sequences(value: Any) -> Iterator[Tensor]:
    """Tensors ``(sample, time, feature)`` among arguments or outputs."""
    if isinstance(value, Tensor):
        if value.ndim == 3 and value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _sequences(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _sequences(part)
