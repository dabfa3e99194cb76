"""Finding one formula inside another, up to a renaming of indices; and where a formula grows in one of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Basic

from theory.expressions import INDICES, Block, Entry, Expectation, Norm, ScalarSum
from theory.symbols import with_head

Binding = dict[Any, Any]


@dataclass(frozen=True)
class Equation:
    """A result that a step may cite: ``lhs relation rhs``, known by its name."""

    name: str
    lhs: Any
    relation: str
    rhs: Any


def match(pattern: Basic, node: Basic, binding: Binding | None = None) -> Binding | None:
    """How the indices of ``pattern`` must be renamed to make it ``node``; None if no renaming does."""
    binding = dict(binding or {})
    if pattern in INDICES:
        if node not in INDICES and not node.is_Integer:
            return None
        return binding if binding.setdefault(pattern, node) == node else None
    if not pattern.args:
        return binding if pattern == node else None
    if pattern.func is not node.func or len(pattern.args) != len(node.args):
        return None
    loose = isinstance(pattern, sympy.Add | sympy.Mul | sympy.KroneckerDelta) and len(pattern.args) <= 5
    orders = itertools.permutations(node.args) if loose else [node.args]
    for order in orders:
        current: Binding | None = binding
        for one, two in zip(pattern.args, order, strict=True):
            current = match(one, two, current)
            if current is None:
                break
        else:
            return current
    return None


def occurrences(pattern: Basic, node: Basic) -> Iterator[tuple[Basic, Binding]]:
    """Every part of ``node`` that is ``pattern`` up to a renaming of indices."""
    for part in sympy.preorder_traversal(node):
        binding = match(pattern, part)
        if binding is not None:
            yield part, binding


def cited(equation: Equation, lhs: Basic, rhs: Basic) -> bool:
    """Whether a step between ``lhs`` and ``rhs`` can be an application of the equation: one of its sides occurs.

    A result about one head may be cited for any head.
    """
    sides = [side for one in (equation.lhs, equation.rhs) if one.atoms(Block, Entry) for side in (one, with_head(one))]
    return any(next(occurrences(side, whole), None) is not None for side in sides for whole in (lhs, rhs))


def direction(node: Basic, part: Basic) -> int | None:
    """Whether ``node`` grows (1), falls (-1) or stays (0) as ``part`` grows; None if its form does not say."""
    if node == part:
        return 1
    if not node.has(part):
        return 0
    if isinstance(node, ScalarSum | Expectation | sympy.exp):
        return direction(node.args[0], part)
    if isinstance(node, sympy.Add):
        found = {direction(term, part) for term in node.args} - {0}
        return found.pop() if len(found) == 1 else None
    if isinstance(node, sympy.Mul):
        return _direction_of_product(node, part)
    if isinstance(node, sympy.Pow) and node.exp.is_number and node.base.is_nonnegative:
        inside = direction(node.base, part)
        return None if inside is None else inside * (1 if node.exp > 0 else -1)
    return None


def _direction_of_product(node: Basic, part: Basic) -> int | None:
    sign, found = 1, set()
    for factor in node.args:
        if factor.is_number and factor.is_negative:
            sign = -sign
        elif not factor.is_nonnegative and (len(node.args) > 2 or not node.args[0].is_number):
            return None
        found.add(direction(factor, part))
    found -= {0}
    if len(found) != 1 or None in found:
        return None
    return sign * found.pop()  # type: ignore[operator]


def norms(node: Basic) -> list[Any]:
    """The outermost norms in an expression."""
    if isinstance(node, Norm):
        return [node]
    return [found for argument in node.args for found in norms(argument)] if node.args else []
