"""Layers of rational functions whose derivatives are SymPy's own: the oracle of every closed form."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import sympy
from sympy import QQ

from theory.arithmetic import Number
from theory.instance import Instance, Lifted, RationalNumbers
from theory.layer import Layer, Numbers, Parameters, Sizes


class _FieldNumbers(RationalNumbers):
    """Elements of the field of rational functions; no derivatives here."""


class Exponential(sympy.Function):
    """``exp``, except that SymPy does not merge products of it into one exponential of a sum."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        """Its own derivative."""
        return self


class _ExpressionNumbers(Numbers):
    """SymPy expressions with exponentials; remembers which exponential each generator stands for."""

    def __init__(self, instance: SymbolicInstance, cut: str) -> None:
        self.instance, self.cut = instance, cut

    def seed(self, name: str, index: tuple[int, ...], value: Number) -> Number:
        """The value, made free if the map is cut here."""
        if name != self.cut:
            return value
        symbol = sympy.Symbol("_".join(map(str, (name, *index))), real=True)
        self.instance.known.setdefault(symbol, lambda: self.instance.value_of(name, index))
        return symbol

    def exponentials(self, head: int, query: int, scores: list[Number | None]) -> list[Number]:
        """The exponentials of one row of scores."""
        values = []
        for key, score in enumerate(scores):
            value = sympy.S.Zero if score is None else Exponential(score)
            if score is not None:
                weight = self.instance.weightless(head, query, key)
                self.instance.known[value] = lambda weight=weight: weight
            values.append(value)
        return values

    def root(self, time: int, value: Number) -> Number:
        """The square root of a variance."""
        self.instance.roots[value] = self.instance.parameters.sigma[time]
        return sympy.sqrt(value)


class _Expressions(Lifted):
    """The forward map as SymPy expressions in the free variable."""

    def __init__(self, base: SymbolicInstance, cut: str) -> None:
        super().__init__(base, cut)
        p = base.parameters
        self.parameters = Parameters(
            **{
                name: _as_expressions(getattr(p, name))
                for name in ("x", "heads", "b_O", "B", "m", "e", "rotations", "gamma", "shift", "sigma", "scalars")
            }
        )

    def numbers(self, cut: str) -> Numbers:
        """How these numbers behave, with the variable ``cut`` free."""
        return _ExpressionNumbers(self.base, self.cut)  # type: ignore[arg-type]

    def convert(self, number: Any) -> Number:
        """A plain rational as one of these numbers."""
        return sympy.Rational(number)

    def scalar(self, name: str) -> Number:
        """A number without indices."""
        return _as_expressions(self.base.scalar(name))


class SymbolicInstance(Instance):
    """Rational functions of what is ``free``: the tokens, the exponentials (``"weights"``), or nothing."""

    kind = "symbolic"

    def __init__(
        self, layer: Layer, sizes: Sizes, parameters: Parameters, seed: int, free: str = "tokens weights"
    ) -> None:
        times, heads = range(sizes.T), range(sizes.H)
        visible = [(h, i, k) for h in heads for i in times for k in times if not layer.hides(i, k)]
        names = [f"e_{h}_{i}_{k}" for h, i, k in visible] if "weights" in free else []
        names += [f"x_{i}_{r}" for i in times for r in range(sizes.D)] if "tokens" in free else []
        names += [f"sigma_{i}" for i in times] if layer.norm else []
        names += ["exp_beta"] if layer.penalty else []
        self.field = QQ.frac_field(*names) if names else QQ
        gens = dict(zip(names, self.field.gens if names else (), strict=True))
        p = parameters
        parameters = Parameters(
            **{name: self._convert(getattr(p, name)) for name in Parameters.__dataclass_fields__ if name != "e"},
            e=[
                [[gens.get(f"e_{h}_{i}_{k}") or self.convert(p.e[h][i][k]) for k in times] for i in times]
                for h in heads
            ],
        )
        if "tokens" in free:
            parameters.x = [[gens[f"x_{i}_{r}"] for r in range(sizes.D)] for i in times]
        if layer.norm:
            parameters.sigma = [gens[f"sigma_{i}"] for i in times]
        if layer.penalty:
            parameters.scalars["exp_beta"] = gens["exp_beta"]
        super().__init__(layer, sizes, parameters, seed)
        self.known: dict[Any, Any] = {}
        self.roots: dict[Any, Any] = {}

    def numbers(self, cut: str) -> Numbers:
        """How these numbers behave, with the variable ``cut`` free."""
        return _FieldNumbers(self, "")

    @cache  # noqa: B019 - an instance lives as long as the check that made it
    def lifted(self, cut: str) -> Instance:
        """The same instance with the variable ``cut`` free."""
        return _Expressions(self, cut)

    def slope(self, number: Number, key: tuple[Any, ...]) -> Number:
        """The derivative of a lifted number along one component."""
        variable = sympy.Symbol("_".join(map(str, key)), real=True)
        return self._from_expression(sympy.diff(sympy.sympify(number), variable))

    def convert(self, number: Any) -> Number:
        """A plain rational as one of these numbers."""
        return QQ(number) if self.field is QQ else self.field.field(QQ(number))

    def value_of(self, name: str, index: tuple[int, ...]) -> Number:
        """The value of a free variable at the point of this instance."""
        value = self.table[name]
        for position in index:
            value = value[position]
        return value[0] if isinstance(value, list) else value

    def _convert(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._convert(item) for item in value]
        if isinstance(value, dict):
            return {name: self._convert(item) for name, item in value.items()}
        return self.convert(value)

    def _from_expression(self, expression: Any) -> Number:
        """A differentiated expression as a rational function: exponentials and roots become their generators."""

        @cache
        def value(node: Any) -> Number:
            if node in self.known:
                return self.known[node]()
            if node.is_Rational:
                return self.convert(QQ(node.p, node.q))
            if node.is_Pow and node.exp.is_Rational and node.base in self.roots:
                return self.roots[node.base] ** int(2 * node.exp)
            if node.is_Pow and node.exp.is_Integer:
                return value(node.base) ** int(node.exp)
            if node.is_Add:
                return sum((value(term) for term in node.args), self.field.zero)
            if node.is_Mul:
                return math.prod((value(factor) for factor in node.args), start=self.field.one)
            return self.field.from_sympy(node)

        return value(expression)


def _as_expressions(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_expressions(item) for item in value]
    if isinstance(value, dict):
        return {name: _as_expressions(item) for name, item in value.items()}
    return value.as_expr() if hasattr(value, "as_expr") else sympy.Rational(value.numerator, value.denominator)
