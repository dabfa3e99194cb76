"""Proofs for abstract T: the softmax as SymPy's indexed sums, differentiated by SymPy itself."""

from __future__ import annotations

from typing import Any

import sympy
from sympy import Basic, IndexedBase, KroneckerDelta

from theory.expressions import INDICES, Entry, ScalarSum, Slope
from theory.symbols import T

_SCORES = IndexedBase("s", real=True)
_SPARE = sympy.Symbol("r", integer=True, positive=True)


def equal(left: Basic, right: Basic) -> bool:
    """Whether two expressions in scores and weights of one row agree for every T."""
    difference = _sift(indexed(left) - indexed(right))
    unknowns = {part: sympy.Dummy() for part in difference.atoms(sympy.Sum)}
    return sympy.cancel(sympy.together(difference.xreplace(unknowns))) == 0


def indexed(node: Basic) -> Any:
    """The expression over ``IndexedBase`` scores: weights written out, sums as ``Sum``, slopes differentiated."""
    if isinstance(node, Entry):
        query, key = node.indices[-2:]
        if node.name == "s":
            return _SCORES[query, key]
        if node.name == "a":
            whole = sympy.Sum(sympy.exp(_SCORES[query, _SPARE]), (_SPARE, 1, T))
            return sympy.exp(_SCORES[query, key]) / whole
        raise TypeError(f"{node} has no form for abstract T")
    if isinstance(node, ScalarSum):
        body, index = node.args
        return sympy.Sum(indexed(body), (index, 1, T))
    if isinstance(node, Slope):
        function, variable = map(indexed, node.args)
        return sympy.diff(function, variable)
    return node.func(*map(indexed, node.args)) if node.args else node


def _sift(node: Any) -> Any:
    """Sums over a Kronecker delta, for indices that lie in 1..T, and one name for every summation index."""

    def sifted(whole: Any) -> Any:
        body, (index, *_) = whole.args[0], whole.args[1]
        for factor in sympy.Mul.make_args(sympy.expand(body)):
            if isinstance(factor, KroneckerDelta) and factor.has(index):
                other = factor.args[0] if factor.args[1] == index else factor.args[1]
                return (body / factor).subs(index, other)
        if index in INDICES:
            return sympy.Sum(body.subs(index, _SPARE), (_SPARE, 1, T))
        return whole

    node = node.replace(KroneckerDelta(sympy.S.One, sympy.S.One), sympy.S.One)
    same = node.atoms(KroneckerDelta)
    for found in same:
        if found.args[0] == found.args[1]:
            node = node.subs(found, 1)
    return node.replace(lambda part: isinstance(part, sympy.Sum), sifted)
