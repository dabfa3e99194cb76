"""The value of an expression in an instance, for given indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import sympy
from sympy import Basic

from theory.arithmetic import Dual, Number, Rows, each, plus, product, scaled, spectral_norm, transposed
from theory.expressions import (
    HEADS,
    Block,
    Entry,
    Expectation,
    Inner,
    MatrixSlope,
    MatrixSum,
    Norm,
    Partial,
    ScalarSum,
    Slope,
    free_indices,
    is_matrix,
)
from theory.instance import Instance
from theory.symbols import NAMES

Environment = dict[Any, int]


def value(node: Basic, instance: Instance, at: Environment) -> Any:
    """The number or matrix (rows) that ``node`` is, with its open indices (counted from 0) given by ``at``."""
    for kind, rule in _RULES.items():
        if isinstance(node, kind):
            return rule(node, instance, at)
    raise TypeError(f"no value is known for {type(node).__name__}: {node}")


def environments(instance: Instance, *nodes: Basic) -> Iterator[Environment]:
    """Every value of the open indices of the nodes."""
    environment: list[Environment] = [{}]
    for index in free_indices(*nodes):
        size = instance.sizes.H if index in HEADS else instance.sizes.T
        environment = [{**old, index: value} for old in environment for value in range(size)]
    yield from environment


def _place(index: Basic, at: Environment) -> int:
    return at[index] if index in at else int(index) - 1


def _leaf(node: Block | Entry, instance: Instance, at: Environment) -> Any:
    _, headed, times = NAMES[node.name]
    places = [_place(index, at) for index in node.indices]
    if headed and len(places) == times:
        places = [0, *places]
    found = _derived(node.name, instance, places) if node.name in _DERIVED else instance.table[node.name]
    for place in places:
        found = found[place]
    return found


def _symbol(node: Basic, instance: Instance, at: Environment) -> Number:
    return instance.convert(at[node] + 1) if node in at else instance.scalar(node.name)


def _norm_jacobian(instance: Instance, time: int) -> Rows:
    """The Jacobian of the layer normalisation by differentiating it, not by its closed form."""
    lifted = instance.lifted("u" if instance.layer.norm == "post" else "x")
    name = "u" if instance.layer.norm == "post" else "x"
    keys = [(name, time, r) for r in range(instance.sizes.D)]
    return [[instance.slope(row[0], key) for key in keys] for row in lifted.table["z"][time]]


def _largest_w(instance: Instance, head: int) -> Number:
    weight, queries = instance.table["W_K"][head], instance.table["q"][head]
    c = instance.parameters.scalars["c"]
    return max(c * spectral_norm(product(transposed(weight), query)) for query in queries)


_DERIVED: dict[str, Callable[..., Any]] = {"L": _norm_jacobian, "w_max": _largest_w}


def _derived(name: str, instance: Instance, places: list[int]) -> Any:
    return {places[0]: _DERIVED[name](instance, places[0])}


def _exponential(node: Basic, instance: Instance, at: Environment) -> Number:
    """``exp`` of a sum of scores, gaps and scalars as a product of unknowns; of anything else in doubles."""
    if not instance.exact:
        return math.exp(min(value(node.args[0], instance, at), 700.0))
    result = instance.convert(1)
    for term in sympy.Add.make_args(node.args[0]):
        coefficient, base = term.as_coeff_Mul()
        if isinstance(base, Entry):
            places = [_place(index, at) for index in base.indices]
            headed = len(places) > NAMES[base.name][2]
            head = places.pop(0) if headed else 0
            factor = instance.exponential(base.name, head, tuple(places))
        elif base.is_Symbol:
            factor = instance.exponential(base.name, 0, ())
        else:
            raise TypeError(f"exp({node.args[0]}) has no exact value")
        result = result * factor ** int(coefficient)
    return result


def _sum(node: Basic, instance: Instance, at: Environment) -> Any:
    body, index, *skip = node.args
    size = instance.sizes.H if index in HEADS else instance.sizes.T
    skipped = _place(skip[0], at) if skip else None
    terms = [value(body, instance, {**at, index: place}) for place in range(size) if place != skipped]
    if is_matrix(body):
        if not terms:
            return scaled(0, value(body, instance, {**at, index: 0}))
        whole = terms[0]
        for term in terms[1:]:
            whole = plus(whole, term)
        return whole
    return sum(terms, instance.convert(0))


def _product(node: Basic, instance: Instance, at: Environment) -> Any:
    number, matrix = None, None
    for factor in node.args:
        part = value(factor, instance, at)
        if is_matrix(factor):
            matrix = part if matrix is None else product(matrix, part)
        else:
            number = part if number is None else number * part
        if number == 0 and not isinstance(number, Dual) and not is_matrix(node):
            return number
    return number if matrix is None else matrix if number is None else scaled(number, matrix)


def _add(node: Basic, instance: Instance, at: Environment) -> Any:
    terms = [value(term, instance, at) for term in node.args]
    if not is_matrix(node):
        return sum(terms[1:], terms[0])
    whole = terms[0]
    for term in terms[1:]:
        whole = plus(whole, term)
    return whole


def _power(node: Basic, instance: Instance, at: Environment) -> Number:
    base = value(node.base, instance, at)
    if node.exp.is_Integer:
        return base ** int(node.exp) if node.exp > 0 else instance.convert(1) / base ** int(-node.exp)
    return base ** value(node.exp, instance, at)


def _partial(node: Basic, instance: Instance, at: Environment) -> Rows:
    place = tuple((index, at[index]) for index in free_indices(node) if index in at)
    known = instance.derivatives.get((node, place))
    if known is None:
        known = instance.derivatives[node, place] = _differentiated(node, instance, at)
    return known


def _differentiated(node: Basic, instance: Instance, at: Environment) -> Rows:
    function, variable = node.args
    lifted = instance.lifted(variable.name)
    time = _place(variable.indices[-1], at)
    keys = [(variable.name, time, r) for r in range(instance.sizes.D)]
    rows = value(function, lifted, at)
    numbers = [row[0] for row in rows] if is_matrix(function) else [rows]
    return [[instance.slope(number, key) for key in keys] for number in numbers]


def _slope(node: Basic, instance: Instance, at: Environment) -> Any:
    function, variable = node.args
    places = tuple(_place(index, at) for index in getattr(variable, "indices", ()))
    if variable.name == "s" and len(places) == 2:
        places = (0, *places)
    found = value(function, instance.lifted(variable.name), at)
    if is_matrix(function):
        return each(lambda number: instance.slope(number, (variable.name, *places)), found)
    return instance.slope(found, (variable.name, *places))


def _expectation(node: Basic, instance: Instance, at: Environment) -> Number:
    """The mean over every order of the tokens: each exchangeable law is a mixture of such laws."""
    found = [value(node.args[0], other, at) for other in instance.orders]
    return sum(found[1:], found[0]) / len(found)


def _identity(node: Basic, instance: Instance, at: Environment) -> Rows:
    size = getattr(instance.sizes, str(node.args[0]))
    return [[instance.convert(int(r == s)) for s in range(size)] for r in range(size)]


def _zero(node: Basic, instance: Instance, at: Environment) -> Rows:
    rows, columns = (int(n) if n.is_Integer else getattr(instance.sizes, str(n)) for n in node.shape)
    return [[instance.convert(0)] * columns for _ in range(rows)]


def _delta(node: Basic, instance: Instance, at: Environment) -> Number:
    return instance.convert(int(_place(node.args[0], at) == _place(node.args[1], at)))


def _inner(node: Basic, instance: Instance, at: Environment) -> Number:
    left, right = (value(argument, instance, at) for argument in node.args)
    return product(transposed(left), right)[0][0]


_RULES: dict[Any, Callable[..., Any]] = {
    Block: _leaf,
    Entry: _leaf,
    sympy.Symbol: _symbol,
    sympy.Rational: lambda node, instance, at: instance.convert(sympy.QQ(node.p, node.q)),
    sympy.MatMul: _product,
    sympy.Mul: _product,
    sympy.MatAdd: _add,
    sympy.Add: _add,
    sympy.Pow: _power,
    sympy.exp: _exponential,
    sympy.Transpose: lambda node, instance, at: transposed(value(node.arg, instance, at)),
    sympy.KroneckerDelta: _delta,
    sympy.Identity: _identity,
    sympy.ZeroMatrix: _zero,
    MatrixSum: _sum,
    ScalarSum: _sum,
    Inner: _inner,
    Norm: lambda node, instance, at: spectral_norm(each(float, value(node.args[0], instance, at))),
    Partial: _partial,
    Slope: _slope,
    MatrixSlope: _slope,
    Expectation: _expectation,
}
