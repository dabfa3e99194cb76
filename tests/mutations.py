"""Wrong steps, planted: every way of spoiling a formula in one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
from sympy import MatAdd, MatMul, S

from theory import symbols as t
from theory.expressions import Block, Entry, Inner, MatrixSum, Norm, ScalarSum, add, is_matrix, mul, norm, total

WEIGHTS = {"W_Q": "W_K", "W_K": "W_V", "W_V": "W_Q"}
MEANS = {"vbar": "v", "kbar": "k", "xbar": "x", "vrest": "vbar", "krest": "kbar", "Crest": "Cov", "o": "vbar"}


def spoiled(node: Any) -> Iterator[tuple[str, Any]]:
    """Every formula that differs from ``node`` in one place, with what was done there."""
    yield from _here(node)
    if isinstance(node, Block | Entry) or not node.args:
        return
    body_only = isinstance(node, ScalarSum | MatrixSum)
    for place, part in enumerate(node.args):
        if body_only and place > 0:
            continue
        for what, wrong in spoiled(part):
            arguments = [*node.args[:place], wrong, *node.args[place + 1 :]]
            try:
                yield what, _rebuilt(node, arguments)
            except (ValueError, TypeError, AttributeError):
                continue  # shapes that do not fit cannot even be written down


def _rebuilt(node: Any, arguments: list[Any]) -> Any:
    if isinstance(node, MatMul):
        return mul(*arguments)
    if isinstance(node, MatAdd):
        return add(*arguments)
    if isinstance(node, ScalarSum | MatrixSum):
        return total(*arguments)
    if isinstance(node, Norm):
        return norm(*arguments)
    return node.func(*arguments)


def _here(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, MatAdd | sympy.Add):
        for place, term in enumerate(node.args):
            others = [*node.args[:place], *node.args[place + 1 :]]
            yield f"term {place + 1} dropped", add(*others)
            yield f"sign of term {place + 1}", add(*node.args[:place], mul(-1, term), *node.args[place + 1 :])
    if isinstance(node, sympy.KroneckerDelta):
        yield "delta dropped", S.One
    if node == t.c:
        yield "factor c dropped", S.One
    if node == t.R:
        yield "R doubled", 2 * t.R
    if isinstance(node, Entry) and len(node.indices) >= 2 and node.name in ("a", "b", "s", "m"):
        *head, query, key = node.indices
        if query != key:
            yield f"{node.name} transposed", node.func(node.name, *head, key, query)
    if isinstance(node, Block) and node.name in WEIGHTS:
        yield f"{node.name} for another", Block(WEIGHTS[node.name], *node.args[1:])
    if isinstance(node, Block) and node.name in MEANS and (node.name != "xbar" or len(node.indices) == 1):
        yield f"{node.name} for {MEANS[node.name]}", Block(MEANS[node.name], *node.args[1:])
    if isinstance(node, Block) and node.indices and node.indices[-1] in (t.i, t.j) and node.name not in ("L",):
        other = t.j if node.indices[-1] == t.i else t.i
        yield f"{node.name}_{node.indices[-1]} for {node.name}_{other}", node.func(*node.args[:-1], other)
    if isinstance(node, Block) and node.name in ("Cov", "Crest"):
        yield f"{node.name} transposed", sympy.Transpose(node)
    if isinstance(node, sympy.exp):
        yield "exponent's sign", sympy.exp(-node.args[0])
    if isinstance(node, Inner) or (is_matrix(node) and isinstance(node, MatMul)):
        yield "doubled", mul(2, node) if is_matrix(node) else 2 * node
