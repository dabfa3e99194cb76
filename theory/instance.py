"""Concrete small layers in which every formula has a value.

Three kinds of number, one forward map:

- :class:`RationalInstance`: exact rationals. A weight is ``e_ij / sum_l e_il`` with free positive rationals ``e`` in
  the place of the exponentials, so nothing is rounded; derivatives come from dual numbers with ``de = e ds``.
- :class:`theory.symbolic.SymbolicInstance`: rational functions of the exponentials, and tokens.
  Derivatives are SymPy's own ``diff`` of the forward map with its exponentials: an oracle that shares nothing with the
  closed forms. Equality is a proof for these sizes.
- :class:`FloatInstance`: doubles with true exponentials, for inequalities.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from sympy import QQ

from theory.arithmetic import Dual, Number, plain
from theory.layer import Layer, Numbers, Parameters, Sizes, Table, forward


class Instance:
    """One layer of given sizes with numbers in it; ``table`` holds the value of every leaf."""

    kind = "instance"
    exact = True

    @property
    def rounding(self) -> float:
        """Differences below this are rounding; none in exact arithmetic."""
        return 0.0

    def __init__(self, layer: Layer, sizes: Sizes, parameters: Parameters, seed: int) -> None:
        self.layer, self.sizes, self.parameters, self.seed = layer, sizes, parameters, seed
        self.derivatives: dict[Any, Any] = {}

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self.sizes, name)}" for name in "TDdH")
        return f"{self.kind} layer with {sizes}, seed {self.seed}"

    @cached_property
    def table(self) -> Table:
        """The value of every leaf by name."""
        return forward(self.layer, self.sizes, self.parameters, self.numbers(""))

    def numbers(self, cut: str) -> Numbers:
        """How this instance's numbers behave, with the variable ``cut`` free."""
        raise NotImplementedError

    def lifted(self, cut: str) -> Instance:
        """The same instance with numbers that remember how they depend on the variable ``cut``."""
        raise NotImplementedError

    def slope(self, number: Number, key: tuple[Any, ...]) -> Number:
        """The derivative of a lifted number along one component of the free variable."""
        raise NotImplementedError

    def scalar(self, name: str) -> Number:
        """A number without indices: T, D, H, c, R, beta, p."""
        sizes = {"T": self.sizes.T, "D": self.sizes.D, "d": self.sizes.d, "H": self.sizes.H}
        return self.convert(sizes[name]) if name in sizes else self.parameters.scalars[name]

    def exponential(self, name: str, head: int, times: tuple[int, ...]) -> Number:
        """``exp`` of a score, a gap of scores, or a scalar."""
        if name == "s":
            return self.weightless(head, times[0], times[1])
        if name == "gap":
            return self.weightless(head, times[0], times[1]) / self.weightless(head, times[0], times[2])
        return self.parameters.scalars[f"exp_{name}"]

    def weightless(self, head: int, query: int, key: int) -> Number:
        """The unnormalised weight ``exp(s_ij)``."""
        if self.layer.hides(query, key):
            return self.convert(0)
        factor = self.parameters.scalars["exp_beta"] if self.layer.penalty and query == key else 1
        return self.parameters.e[head][query][key] * factor

    def convert(self, number: Any) -> Number:
        """A plain rational as a number of this instance."""
        return QQ(number)

    def permutations(self) -> Iterator[Instance]:
        """This instance with its tokens in every order."""
        for order in itertools.permutations(range(self.sizes.T)):
            p = self.parameters
            e = [[[row[k] for k in order] for row in (head[q] for q in order)] for head in p.e]
            yield type(self)(self.layer, self.sizes, replace(p, x=[p.x[i] for i in order], e=e), self.seed)

    @cached_property
    def orders(self) -> list[Instance]:
        """The permuted instances, built once."""
        return list(self.permutations())


class Lifted(Instance):
    """An instance whose numbers carry derivatives."""

    def __init__(self, base: Instance, cut: str) -> None:
        super().__init__(base.layer, base.sizes, base.parameters, base.seed)
        self.base, self.cut = base, cut

    def numbers(self, cut: str) -> Numbers:
        """How these numbers behave, with the variable ``cut`` free."""
        return self.base.numbers(self.cut)

    def convert(self, number: Any) -> Number:
        """A plain rational as one of these numbers."""
        return self.base.convert(number)

    def scalar(self, name: str) -> Number:
        """A number without indices."""
        value = self.base.scalar(name)
        return self.numbers("").seed(name, (), value)

    def exponential(self, name: str, head: int, times: tuple[int, ...]) -> Number:
        """``exp`` of a score, a gap of scores, or a scalar."""
        if name != "s":
            value = self.base.exponential(name, head, times)
            return Dual(value, {(name,): value}) if name == self.cut else value
        hidden = [self.layer.hides(times[0], key) for key in range(self.sizes.T)]
        scores = [None if hide else score for hide, score in zip(hidden, self.table["s"][head][times[0]], strict=True)]
        return self.numbers("").exponentials(head, times[0], scores)[times[1]]


# -- exact rationals ---------------------------------------------------------------------------------------------------


class RationalNumbers(Numbers):
    """Exact numbers, or duals of them where the map is cut; an exponential is a free number with ``de = e ds``."""

    def __init__(self, instance: Instance, cut: str) -> None:
        self.instance, self.cut = instance, cut

    def seed(self, name: str, index: tuple[int, ...], value: Number) -> Number:
        """The value, made free if the map is cut here."""
        return Dual(plain(value), {(name, *index): self.instance.convert(1)}) if name == self.cut else value

    def exponentials(self, head: int, query: int, scores: list[Number | None]) -> list[Number]:
        """The exponentials of one row of scores."""
        values = []
        for key, score in enumerate(scores):
            value = self.instance.convert(0) if score is None else self.instance.weightless(head, query, key)
            slopes = score.slopes if isinstance(score, Dual) else {}
            values.append(Dual(value, {n: value * slope for n, slope in slopes.items()}) if slopes else value)
        return values

    def root(self, time: int, value: Number) -> Number:
        """The square root of a variance."""
        sigma = self.instance.parameters.sigma[time]
        if not isinstance(value, Dual):
            return sigma
        return Dual(sigma, {name: slope / (2 * sigma) for name, slope in value.slopes.items()})


class RationalInstance(Instance):
    """Exact rationals, with free positive rationals in the place of exponentials and standard deviations."""

    kind = "rational"

    def numbers(self, cut: str) -> Numbers:
        """How these numbers behave, with the variable ``cut`` free."""
        return RationalNumbers(self, cut)

    @cache  # noqa: B019 - an instance lives as long as the check that made it
    def lifted(self, cut: str) -> Instance:
        """The same instance with the variable ``cut`` free."""
        return Lifted(self, cut)

    def slope(self, number: Number, key: tuple[Any, ...]) -> Number:
        """The derivative of a lifted number along one component."""
        return number.slopes.get(key, self.convert(0)) if isinstance(number, Dual) else self.convert(0)


# -- doubles -----------------------------------------------------------------------------------------------------------


class _FloatNumbers(RationalNumbers):
    def exponentials(self, head: int, query: int, scores: list[Number | None]) -> list[Number]:
        """The exponentials of one row of scores."""
        largest = max(plain(score) for score in scores if score is not None)
        values = []
        for score in scores:
            value = 0.0 if score is None else math.exp(plain(score) - largest)
            slopes = score.slopes if isinstance(score, Dual) else {}
            values.append(Dual(value, {n: value * slope for n, slope in slopes.items()}) if slopes else value)
        return values

    def root(self, time: int, value: Number) -> Number:
        """The square root of a variance."""
        sigma = math.sqrt(plain(value))
        return Dual(sigma, {n: x / (2 * sigma) for n, x in value.slopes.items()}) if isinstance(value, Dual) else sigma


class FloatInstance(RationalInstance):
    """Doubles with true exponentials; ``R`` is the norm of the longest token."""

    kind = "float"
    exact = False

    @cached_property
    def rounding(self) -> float:
        """Differences below this are rounding: 1e-14 of the product of the layer's largest numbers."""
        parts = (_flat(self.table[name]) for name in ("x", "v", "W_O", "W_K", "q"))
        return 1e-14 * math.prod(1 + max(map(abs, part)) for part in parts)

    def numbers(self, cut: str) -> Numbers:
        """How these numbers behave, with the variable ``cut`` free."""
        return _FloatNumbers(self, cut)

    def convert(self, number: Any) -> Number:
        """A plain rational as one of these numbers."""
        return float(number)

    def weightless(self, head: int, query: int, key: int) -> Number:
        """The unnormalised weight ``exp(s_ij)``."""
        return 0.0 if self.layer.hides(query, key) else math.exp(self.table["s"][head][query][key])

    def exponential(self, name: str, head: int, times: tuple[int, ...]) -> Number:
        """``exp`` of a score, a gap of scores, or a scalar."""
        if name in ("s", "gap"):
            value = self.table[name][head]
            for time in times:
                value = value[time]
            return math.exp(value)
        return math.exp(self.parameters.scalars[name])


def _flat(value: Any) -> list[float]:
    return [number for item in value for number in _flat(item)] if isinstance(value, list) else [value]
