"""Steps and derivations: formulas with reasons, which a machine checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from sympy import Basic

from theory import abstract
from theory.arithmetic import spectral_norm
from theory.evaluate import Environment, environments, value
from theory.expressions import HEADS, Block, Entry, Expectation, Inner, Norm, Partial, Slope, is_matrix
from theory.instance import Instance
from theory.layer import Layer
from theory.matching import Equation, cited
from theory.rules import DEFINITION, Rule
from theory.samples import exact_instances, floating_instances

RELATIONS = ("=", "<=")
#: Slack of comparisons in doubles; exact comparisons have none.
ROUNDING = 1e-9
_PLAIN: Layer = Layer()


class DerivationError(ValueError):
    """A step that does not hold; the message names derivation, step and counterexample."""


class _Fails(Exception):  # noqa: N818
    """What is wrong with one step."""


@dataclass(frozen=True)
class Step:
    """One step ``lhs relation rhs`` and why it holds.

    Attributes:
        lhs: the left side.
        relation: ``"="`` or ``"<="``.
        rhs: the right side.
        rule: the reason.
        uses: results that it cites: labels of earlier chains of the same derivation, or equations of other derivations.
        label: the name of the chain that starts here; "" if the step goes on from the one before.
        where: conditions on the indices, such as ``Ne(i, j)``.
        abstract: whether the step is also proved with T left abstract, by SymPy's indexed sums.
    """

    lhs: Any
    relation: str
    rhs: Any
    rule: Rule
    uses: tuple[str | Equation, ...] = ()
    label: str = ""
    where: tuple[Any, ...] = ()
    abstract: bool = False

    def check(
        self, layer: Layer = _PLAIN, length: int | None = None, citations: Sequence[Equation] | None = None
    ) -> None:
        """Checks the step on its own.

        Args:
            layer: the variant of the layer that it is about.
            length: the only number of tokens that it is about, or None.
            citations: the equations behind ``uses``; by default those given there as equations.

        Raises:
            DerivationError: it does not hold; with a counterexample, where there is one.
        """
        try:
            self._check(
                layer,
                length,
                [use for use in self.uses if isinstance(use, Equation)] if citations is None else citations,
            )
        except _Fails as fault:
            raise DerivationError(f"step ({self.rule.name}): {fault}") from None

    def latex(self) -> str:
        """The step as one LaTeX formula."""
        from theory.render import step_latex

        return step_latex(self)

    def markdown(self) -> str:
        """The step as one line of Markdown."""
        return f"$`{self.latex()}`$ ({self.rule.name})"

    def _check(self, layer: Layer, length: int | None, citations: Sequence[Equation]) -> None:
        if self.relation not in RELATIONS:
            raise _Fails(f"the relation must be one of {RELATIONS}, not {self.relation!r}")
        if is_matrix(self.lhs) != is_matrix(self.rhs) or (is_matrix(self.lhs) and self.lhs.shape != self.rhs.shape):
            raise _Fails("the sides have different shapes")
        if self.lhs == self.rhs:
            raise _Fails("both sides are the same formula")
        for equation in citations:
            if not cited(equation, self.lhs, self.rhs):
                raise _Fails(f"it cites {equation.name!r}, but neither side of that result occurs in it")
        if self.relation == "<=" and not self.rule.allows(self.lhs, self.rhs, citations):
            raise _Fails(f"the right side is not an upper bound that the rule gives for {self.lhs}")
        if self.abstract and not abstract.equal(self.lhs, self.rhs):
            raise _Fails("the sides differ for abstract T")
        if not _has_leaves(self.lhs, self.rhs):
            _check_scalars(self)
            return
        if self.rule == DEFINITION and isinstance(self.lhs, Partial) and isinstance(self.rhs, Partial):
            inside = replace(self, lhs=self.lhs.args[0], rhs=self.rhs.args[0], uses=())
            inside._check(layer, length, ())
        compared = 0
        for instance in self._instances(layer, length):
            for at in environments(instance, self.lhs, self.rhs, *self.where):
                if all(_holds(condition, at) for condition in self.where):
                    compared += _compare(self, instance, at)
        if not compared:
            raise _Fails("it has a value nowhere, so nothing was compared")

    def _instances(self, layer: Layer, length: int | None) -> Iterator[Instance]:
        """The layers to check on: exact where the formula has an exact value, extreme doubles otherwise."""
        both = sympy.Tuple(self.lhs, self.rhs)
        lengthwise = both.atoms(Norm)
        if not lengthwise and self.relation == "=":
            derivative = any(getattr(part.args[0], "name", "") in ("h", "u") for part in both.atoms(Partial))
            symbols = "oracle" if derivative else "small" if both.atoms(Partial, Slope) else ""
            heads = 2 if both.has(*HEADS) else 1
            yield from exact_instances(layer, heads, length, symbols)
        elif isinstance(self.lhs, Norm) and isinstance(self.rhs, Norm) and self.relation == "=":
            inside = replace(self, lhs=self.lhs.args[0], rhs=self.rhs.args[0], uses=(), abstract=False)
            inside._check(layer, length, ())
            yield from floating_instances(layer, length, count=1)
            return
        if lengthwise or self.relation == "<=":
            orders = bool(both.atoms(Expectation))
            yield from floating_instances(layer, 3 if orders else length, count=1 if orders else 4)


@dataclass(frozen=True)
class Derivation:
    """A chain of steps from a definition to a result.

    Attributes:
        name: what it is called in errors and on the command line.
        title: its heading.
        steps: the steps; each goes on from the one before or starts a chain with a label.
        assumptions: what must hold for it to be true.
        reference: where the result stands in the literature.
        prose: what it says, in words.
        layer: the variant of the layer that it is about.
        results: labels of the chains that are results for others to cite; the last chain is always one.
        length: the only number of tokens that it is about, or None for any.
    """

    name: str
    title: str
    steps: tuple[Step, ...]
    assumptions: tuple[str, ...] = ()
    reference: str = ""
    prose: str = ""
    layer: Layer = field(default_factory=Layer)
    results: tuple[str, ...] = ()
    length: int | None = None

    def check(self) -> None:
        """Checks that the steps link up and that every one of them holds.

        Raises:
            DerivationError: naming the derivation, the number of the step, and a counterexample.
        """
        number = 0
        try:
            self._check_links()
            for number, step in enumerate(self.steps, start=1):
                step._check(self.layer, self.length, self._citations(step, number))
        except _Fails as fault:
            rule = f" ({self.steps[number - 1].rule.name})" if number else ""
            where = f"step {number}{rule}: " if number else ""
            raise DerivationError(f"derivation {self.name!r}, {where}{fault}.") from None

    def result(self, label: str | None = None) -> Equation:
        """The equation that a chain ends in: first left side, last right side; the last chain by default."""
        chains = self._chains()
        if label is None:
            label = list(chains)[-1]
        if label not in chains:
            raise DerivationError(f"derivation {self.name!r} has no chain {label!r}; it has {', '.join(chains)}.")
        steps = chains[label]
        relation = "<=" if any(step.relation == "<=" for step in steps) else "="
        return Equation(f"{self.name}: {label}", steps[0].lhs, relation, steps[-1].rhs)

    def latex(self) -> str:
        """The derivation as a LaTeX section."""
        from theory.render import derivation_latex

        return derivation_latex(self)

    def markdown(self) -> str:
        """The derivation as a Markdown section with LaTeX formulas."""
        from theory.render import derivation_markdown

        return derivation_markdown(self)

    def _chains(self) -> dict[str, list[Step]]:
        chains: dict[str, list[Step]] = {}
        for step in self.steps:
            if step.label or not chains:
                chains[step.label] = []
            chains[list(chains)[-1]].append(step)
        return chains

    def _citations(self, step: Step, number: int) -> list[Equation]:
        earlier = [other.label for other in self.steps[:number] if other.label][:-1]
        for use in step.uses:
            if isinstance(use, str) and use not in earlier:
                raise _Fails(f"it cites {use!r}, which no earlier chain is called")
        return [self.result(use) if isinstance(use, str) else use for use in step.uses]

    def _check_links(self) -> None:
        if not self.steps:
            raise _Fails("it has no steps")
        labels = [step.label for step in self.steps if step.label]
        if not self.steps[0].label or len(set(labels)) != len(labels):
            raise _Fails("every chain must start with a label of its own")
        for number, (before, step) in enumerate(zip(self.steps, self.steps[1:], strict=False), start=2):
            if not step.label and step.lhs != before.rhs:
                raise _Fails(
                    f"step {number} does not go on from step {number - 1}: its left side is not the right side before"
                )
        cited_labels = {use for step in self.steps for use in step.uses if isinstance(use, str)}
        loose = [label for label in labels[:-1] if label not in cited_labels and label not in self.results]
        if loose or not set(self.results) <= set(labels):
            raise _Fails(f"the chains {loose or self.results} are neither used nor results")


class Builder:
    """Writes steps one after another, each going on from the one before."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._current: Any = None
        self._label = ""
        self._where: tuple[Any, ...] = ()

    def start(self, label: str, lhs: Any, where: Sequence[Any] = ()) -> Builder:
        """Starts a chain at ``lhs``; ``where`` holds for the whole chain."""
        self._current, self._label, self._where = lhs, label, tuple(where)
        return self

    def eq(self, rhs: Any, rule: Rule, *uses: str | Equation, abstract: bool = False) -> Builder:
        """Goes on with ``= rhs``."""
        return self._add("=", rhs, rule, uses, abstract)

    def le(self, rhs: Any, rule: Rule, *uses: str | Equation) -> Builder:
        """Goes on with ``<= rhs``."""
        return self._add("<=", rhs, rule, uses, False)

    def _add(self, relation: str, rhs: Any, rule: Rule, uses: tuple[str | Equation, ...], is_abstract: bool) -> Builder:
        self.steps.append(Step(self._current, relation, rhs, rule, uses, self._label, self._where, is_abstract))
        self._current, self._label = rhs, ""
        return self

    def done(self, name: str, title: str, prose: str, **fields: Any) -> Derivation:
        """The derivation."""
        return Derivation(name, title, tuple(self.steps), prose=prose, **fields)


def _has_leaves(*sides: Basic) -> bool:
    return any(side.atoms(Block, Entry, Expectation, Inner) or is_matrix(side) for side in sides)


def _holds(condition: Any, at: Environment) -> bool:
    left, right = (at[side] + 1 if side in at else int(side) for side in condition.args)
    return bool(condition.func(left, right))


def _check_scalars(step: Step) -> None:
    """Explicit functions of T and beta: SymPy simplifies the difference."""
    difference = sympy.simplify((step.lhs.doit() - step.rhs.doit()).rewrite(sympy.exp))
    if step.relation == "=" and difference != 0:
        raise _Fails(f"{step.lhs} is not {step.rhs}: they differ by {difference}")
    if step.relation == "<=" and not (-difference).is_nonnegative:
        raise _Fails(f"{step.lhs} <= {step.rhs} is not plain: the difference is {difference}")


def _compare(step: Step, instance: Instance, at: Environment) -> bool:
    """Compares the sides at one place of one instance; False where a side has no value there (0/0)."""
    try:
        left, right = value(step.lhs, instance, at), value(step.rhs, instance, at)
    except ZeroDivisionError:
        return False
    place = ", ".join(f"{index}={number + 1}" for index, number in at.items())
    where = f"{instance}" + (f", {place}" if place else "")
    if is_matrix(step.lhs):
        fault = _matrix_fault(left, right, instance)
        if fault is not None:
            raise _Fails(f"the sides differ at {where}: {fault}")
        return True
    slack = 0 if instance.exact else ROUNDING * (abs(left) + abs(right)) + instance.rounding
    bad = (
        left - right > slack
        if step.relation == "<="
        else (left != right if instance.exact else abs(left - right) > slack)
    )
    if bad:
        raise _Fails(f"{left} {step.relation} {right} is false at {where}")
    return True


def _matrix_fault(left: Any, right: Any, instance: Instance) -> str | None:
    if (len(left), len(left[0])) != (len(right), len(right[0])):
        return f"shapes {len(left)}x{len(left[0])} and {len(right)}x{len(right[0])}"
    exact = instance.exact
    slack = 0.0 if exact else ROUNDING * (spectral_norm(left) + spectral_norm(right)) + instance.rounding
    for r, (one, two) in enumerate(zip(left, right, strict=True), start=1):
        for s, (x, y) in enumerate(zip(one, two, strict=True), start=1):
            if (x != y) if exact else abs(x - y) > slack:
                return f"entry ({r}, {s}) is {x} on the left and {y} on the right"
    return None
