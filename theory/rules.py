"""The rules that steps name. A rule for equalities is a reason; a rule for inequalities also knows its pattern."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Basic, MatAdd, MatMul

from theory.expressions import Inner, MatrixSum, Norm, ScalarSum, is_matrix, mul, norm
from theory.matching import Equation, direction, norms, occurrences
from theory.symbols import R, with_head

Rewrite = Callable[[Basic, Basic, Sequence[Equation]], Iterator[Basic]]


@dataclass(frozen=True)
class Rule:
    """Why a step holds.

    Attributes:
        name: what steps call it.
        statement: the rule in one line, for readers.
        rewrites: for inequalities, every upper bound that the rule gives for an expression. A step ``lhs <= rhs`` must
            have its ``rhs`` among them.
    """

    name: str
    statement: str
    rewrites: Rewrite | None = None

    def allows(self, lhs: Basic, rhs: Basic, cited: Sequence[Equation]) -> bool:
        """Whether ``lhs <= rhs`` has the rule's pattern."""
        if self.rewrites is None:
            return False
        return any(same(found, rhs) for found in self.rewrites(lhs, rhs, cited))


def same(left: Basic, right: Basic) -> bool:
    """Whether two expressions agree after expanding products and drawing numbers out of norms."""
    return left == right or sympy.expand(left - right) == 0


def _replaced(lhs: Basic, bounds: dict[Basic, Basic]) -> Basic | None:
    """``lhs`` with parts replaced by their upper bounds, if it grows in every one of them."""
    if not bounds or any(direction(lhs, part) != 1 for part in bounds):
        return None
    return lhs.xreplace(bounds)


def _triangle(lhs: Basic, rhs: Basic, cited: Sequence[Equation]) -> Iterator[Basic]:
    def split(part: Any) -> Any:
        inside = part.args[0]
        if isinstance(inside, MatAdd):
            return sympy.Add(*(split(n) if isinstance(n := norm(term), Norm) else n for term in inside.args))
        if isinstance(inside, MatrixSum):
            inner = norm(inside.args[0])
            return ScalarSum(split(inner) if isinstance(inner, Norm) else inner, *inside.args[1:])
        return part

    bounds = {part: split(part) for part in norms(lhs) if split(part) != part}
    for size in range(len(bounds), 0, -1):
        for chosen in itertools.combinations(bounds, size):
            found = _replaced(lhs, {part: bounds[part] for part in chosen})
            if found is not None:
                yield found


def _splits(part: Any) -> list[Basic]:
    """Every product of norms of consecutive factors."""
    inside = part.args[0]
    if not isinstance(inside, MatMul):
        return [part]
    factors = [factor for factor in inside.args if is_matrix(factor)]
    if len(factors) != len(inside.args):
        return [part]
    found = []
    for cuts in itertools.product((False, True), repeat=len(factors) - 1):
        groups: list[list[Any]] = [[factors[0]]]
        for cut, factor in zip(cuts, factors[1:], strict=True):
            if cut:
                groups.append([factor])
            else:
                groups[-1].append(factor)
        found.append(sympy.Mul(*(norm(mul(*group)) for group in groups)))
    return found


def _submultiplicative(lhs: Basic, rhs: Basic, cited: Sequence[Equation]) -> Iterator[Basic]:
    parts = list(dict.fromkeys(norms(lhs)))
    for choice in itertools.product(*(_splits(part) for part in parts)):
        bounds = {part: bound for part, bound in zip(parts, choice, strict=True) if part != bound}
        found = _replaced(lhs, bounds)
        if found is not None:
            yield found


def _cauchy_schwarz(lhs: Basic, rhs: Basic, cited: Sequence[Equation]) -> Iterator[Basic]:
    found = _replaced(lhs, {part: norm(part.args[0]) * norm(part.args[1]) for part in lhs.atoms(Inner)})
    if found is not None:
        yield found


def _ball(lhs: Basic, rhs: Basic, cited: Sequence[Equation]) -> Iterator[Basic]:
    tokens = {part: R for part in lhs.atoms(Norm) if getattr(part.args[0], "name", "") in ("x", "xbar")}
    found = _replaced(lhs, dict(tokens))
    if found is not None:
        yield found


def _bound(lhs: Basic, rhs: Basic, cited: Sequence[Equation]) -> Iterator[Basic]:
    """Every part that has a cited upper bound, replaced by it."""
    bounds: dict[Basic, Basic] = {}
    for equation in cited:
        if equation.relation == "<=":
            for lifted in (lambda side: side, with_head):
                for part, binding in occurrences(lifted(equation.lhs), lhs):
                    bounds.setdefault(part, lifted(equation.rhs).xreplace(binding))
    found = _replaced(lhs, bounds)
    if found is not None:
        yield found


def _nonnegative(lhs: Basic, rhs: Basic, cited: Sequence[Equation]) -> Iterator[Basic]:
    if sympy.expand(rhs - lhs).is_nonnegative:
        yield rhs


DEFINITION = Rule("definition", "one side is the definition of the other")
PRODUCT = Rule("product rule", "the derivative of a product is the sum of the products with one factor differentiated")
QUOTIENT = Rule("quotient rule", "$(f/g)' = (f' g - f g')/g^2$")
CHAIN = Rule(
    "chain rule", "a derivative through the scores of a row is the sum over these scores, each with its own derivative"
)
SIFT = Rule("sifting", r"$\sum_l \delta_{lj} f_l = f_j$")
LINEAR = Rule("linearity", "sums, derivatives and expectations pass through constant factors")
CITE = Rule("substitution", "a result that was derived above is put in")
COLLECT = Rule("algebra", "terms are multiplied out, collected or factored; a scalar's transpose is itself")
ROWS = Rule("weights sum to one", "the weights of one row sum to 1, so the weighted deviations from a mean sum to 0")
CASES = Rule("case", "the indices named here make deltas and hidden weights 0 or 1")
SHIFT = Rule("common factor", "a factor common to numerator and denominator cancels")
CALCULUS = Rule("calculus", "differentiation or limit of an explicit function, done by SymPy")
CHAIN_TOKEN = Rule("chain rule for maps", "the Jacobian of a composition is the product of the Jacobians")
CHAIN_SQUARE = Rule("derivative of a square", "$(f^2)' = 2 f f'$")
EXCHANGE = Rule(
    "exchangeability", "exchangeable tokens: the expectation does not change when two other tokens are swapped"
)
RANK_ONE = Rule("rank one", r"$\lVert u w^\top\rVert = \lVert u\rVert\,\lVert w\rVert$")
TRIANGLE = Rule("triangle inequality", "the norm of a sum is at most the sum of the norms", _triangle)
SUBMULTIPLICATIVE = Rule(
    "submultiplicativity", "the norm of a product is at most the product of the norms", _submultiplicative
)
CAUCHY_SCHWARZ = Rule("Cauchy-Schwarz", "an inner product is at most the product of the lengths", _cauchy_schwarz)
BALL = Rule("ball", "every token, and every mean of tokens, lies in the ball of radius R", _ball)
BOUND = Rule("monotone bound", "the expression grows in a part that has an upper bound above", _bound)
NONNEGATIVE = Rule("dropping", "what is left out is not positive, or what is added is not negative", _nonnegative)
