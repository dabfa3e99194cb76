"""check(): every bound against what the closed form measures on one layer and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from sensitivity import checks
from sensitivity.attention import SoftmaxAttention
from sensitivity.bounds import stack
from sensitivity.bounds.evaluate import EVALUATE
from sensitivity.bounds.problem import Problem
from sensitivity.bounds.verdict import BoundCheck, NotApplicableError, judge
from sensitivity.errors import InputError
from sensitivity.jacobian.norms import Norm, check_norm

NAMES = (*EVALUATE, "stack")
TOLERANCE = {8: 1e-6, 4: 1e-3, 2: 2e-2}
"""Relative slack by bytes of the measured numbers."""


def check(
    attention: SoftmaxAttention | Sequence[SoftmaxAttention],
    tokens: Float[Tensor, "*axes time dim"],
    names: Sequence[str] | None = None,
    norm: Norm = "spectral",
    *,
    rows: int | None = None,
    measured: Float[Tensor, "sample query key"] | None = None,
    tolerance: float | None = None,
) -> dict[str, BoundCheck]:
    """Evaluates the bounds of ``theory.BOUNDS`` on a layer and its tokens, and compares them with the measured norms.

    Everything is computed in float64, whatever the layer's type: rounding is no sensitivity.

    Args:
        attention: the layer; or a sequence of layers, which is checked as a stack.
        tokens: ``(sample, time, dim)``.
        names: bounds to check; all that are for one layer (or for a stack) by default.
        norm: ``spectral``, ``frobenius`` or ``rms``.
        rows: at most so many query rows of each sample, spread evenly; None for all. Costs follow.
        measured: norm maps measured elsewhere with the same norm, to save computing them again.
        tolerance: relative slack: a violation is measured > bound (1 + tolerance). By default 1e-6, or what the type of
            ``measured`` allows.

    Returns:
        A ``BoundCheck`` by name. A bound that says nothing about this layer has ``applies=False`` and the reason.

    Raises:
        InputError: an unknown name or norm, or tokens that do not fit the layer.

    Examples:
        >>> import torch
        >>> from sensitivity import SoftmaxAttention
        >>> tokens = torch.randn(2, 16, 12, generator=torch.Generator().manual_seed(0))
        >>> found = check(SoftmaxAttention.random(12, 3), tokens, names=["local"])
        >>> found["local"].violations, found["local"].blocks, found["local"].tightness > 0.7
        (0, 512, True)
    """
    check_norm(norm)
    single = isinstance(attention, SoftmaxAttention)
    layers = _layers(attention)
    if not layers:
        raise InputError("there is no layer to check; give at least one SoftmaxAttention.")
    wanted = _names(names, single)
    tokens = checks.tokens(tokens, layers[0].dim)
    slack = TOLERANCE[8 if measured is None else measured.element_size()] if tolerance is None else tolerance
    problem = Problem(layers[0], tokens, norm, rows, measured)
    found = {}
    for name in wanted:
        if name == "stack":
            found[name] = _stack(layers, tokens, norm, slack)
        elif single:
            found[name] = _one(name, problem, slack)
        else:
            found[name] = BoundCheck(name, applies=False, reason="this is a bound on one layer, and several were given")
    return found


def _layers(attention: Any) -> list[SoftmaxAttention]:
    layers = list(attention) if isinstance(attention, (list, tuple)) else [attention]
    for layer in layers:
        if not isinstance(layer, SoftmaxAttention):
            raise InputError(
                f"bounds are for a SoftmaxAttention, not {type(layer).__name__}; describe an attention module with "
                "SoftmaxAttention.from_module(module)."
            )
    return layers


def _names(names: Sequence[str] | None, single: bool) -> tuple[str, ...]:
    if names is None:
        return tuple(EVALUATE) if single else ("stack",)
    for name in names:
        if name not in NAMES:
            raise InputError(f"unknown bound {name!r}; choose from {', '.join(NAMES)}.")
    return tuple(names)


def _one(name: str, problem: Problem, tolerance: float) -> BoundCheck:
    evaluate, needed = EVALUATE[name]
    assumptions = [problem.assumptions[short] for short in needed]
    try:
        comparison = evaluate(problem)
    except NotApplicableError as reason:
        by_text = {assumption.text: assumption for assumption in assumptions}
        return BoundCheck(name, applies=False, reason=str(reason), assumptions=by_text)
    return judge(name, comparison, tolerance, assumptions, problem.unit, problem.rows)


def _stack(layers: list[SoftmaxAttention], tokens: Tensor, norm: Norm, tolerance: float) -> BoundCheck:
    if len(layers) < 2:
        return BoundCheck("stack", applies=False, reason="a stack needs at least two layers")
    comparison = stack.compare(layers, tokens, norm)
    return judge("stack", comparison, tolerance, [], stack.unit(norm, layers[0].dim))
