"""Every derivation holds, and every planted wrong step is caught."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import spoiled
from sympy import Ne

import theory
import theory.derivation as module
from theory import attention, expressions, rules, samples, softmax, symbols, variants
from theory.derivation import Builder, Derivation, DerivationError, Step
from theory.evaluate import environments, value
from theory.expressions import Expectation, Norm, Partial, add, delta, mul, norm, sub, total, transpose
from theory.layer import Layer, Sizes
from theory.symbols import W_K, W_O, W_Q, W_V, T, a, beta, c, eye, h, i, j, l, out, q, v, vbar, x

ALL = theory.derivations()
NAMES = [found.name for found in ALL]


# -- what holds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("derivation", ALL, ids=NAMES)
def test_derivation_holds(derivation):
    derivation.check()


def test_names_are_unique_and_known():
    assert len(set(NAMES)) == len(NAMES)
    assert theory.find("key").result().rhs == attention.key_block()
    with pytest.raises(KeyError, match="no derivation is called 'nope'; there are softmax, shift"):
        theory.find("nope")


def test_every_jacobian_is_checked_against_sympys_own_derivative():
    """Every chain that starts at dh/dx has a step whose oracle is SymPy's diff of the forward map."""
    for found in ALL:
        step = found.steps[0]
        if isinstance(step.lhs, Partial) and step.lhs.args[0].name == "h" and found.length is None:
            kinds = {instance.kind for instance in step._instances(found.layer, None)}
            assert kinds == {"rational", "symbolic"}, found.name


# -- what does not hold is caught --------------------------------------------------------------------------------------


def _without_symbols(layer, heads, length, symbols):
    return samples.exact_instances(layer, heads, length, "")


def _true_in_doubles(step, layer, length) -> bool:
    """Whether the sides agree on fresh layers with true exponentials: then the spoiled step is not wrong."""
    for seed in range(100, 102):
        sizes = Sizes(length or 3, 3, 2, 2 if sympy.Tuple(step.lhs, step.rhs).has(h) else 1)
        instance = samples.floating(layer, seed, "no keys" if layer.uniform else "ordinary", sizes)
        for at in environments(instance, step.lhs, step.rhs, *step.where):
            if not all(module._holds(condition, at) for condition in step.where):
                continue
            left, right = value(step.lhs, instance, at), value(step.rhs, instance, at)
            if not isinstance(left, list):
                left, right = [[left]], [[right]]
            gap = max(abs(p - r) for one, two in zip(left, right, strict=True) for p, r in zip(one, two, strict=True))
            if gap > 1e-8 * (1 + max(abs(p) for row in left for p in row)):
                return False
    return True


@pytest.mark.parametrize("derivation", ALL, ids=NAMES)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_spoiled_steps_are_caught(derivation, every, monkeypatch):
    """Hundreds of wrong steps per derivation: one term, sign, factor, index, weight or mean spoiled at a time.

    Every fourth of them, and all where slow tests are asked for.
    """
    monkeypatch.setattr(module, "exact_instances", _without_symbols)
    caught, missed = 0, []
    for number, step in enumerate(derivation.steps, start=1):
        citations = derivation._citations(step, number) if step.relation == "<=" else ()
        for what, rhs in islice(spoiled(step.rhs), number % every, None, every):
            wrong = replace(step, rhs=rhs)
            if rhs == step.rhs:
                continue
            try:
                wrong.check(derivation.layer, derivation.length, citations)
            except DerivationError:
                caught += 1
                continue
            if step.relation == "<=" or not (
                module._has_leaves(rhs) and _true_in_doubles(*_measured(wrong, derivation))
            ):
                missed.append(f"step {number}: {what}")
    assert caught
    assert not missed


def _measured(step, derivation):
    """Uniform logits have no true exponentials behind them unless the bias is left out too."""
    layer = replace(derivation.layer, exchangeable=True) if derivation.layer.uniform else derivation.layer
    return step, layer, derivation.length


def _step(rhs, lhs=None, relation="=", rule=rules.CITE, where=()):
    return Step(Partial(out(i), x(j)) if lhs is None else lhs, relation, rhs, rule, where=where)


KEY = mul(c, a(i, j), W_O(), sub(v(j), vbar(i)), transpose(mul(transpose(W_K()), q(i))))
VALUE, QUERY, RESIDUAL = attention.value_block(), attention.query_block(), mul(delta(i, j), eye)
PLANTED = {
    "sign of the key path": add(RESIDUAL, VALUE, mul(-1, KEY), QUERY),
    "no delta at the residual": add(eye, VALUE, KEY, QUERY),
    "no delta at the query path": add(RESIDUAL, VALUE, KEY, attention.query_core()),
    "value weight transposed": add(RESIDUAL, mul(a(i, j), transpose(mul(W_O(), W_V()))), KEY, QUERY),
    "no factor c": add(
        RESIDUAL,
        VALUE,
        mul(a(i, j), W_O(), sub(v(j), vbar(i)), transpose(mul(transpose(W_K()), q(i)))),
        QUERY,
    ),
    "mean of the wrong row": add(RESIDUAL, VALUE, mul(c, a(i, j), W_O(), sub(v(j), vbar(j)), attention.gain()), QUERY),
    "query path dropped": add(RESIDUAL, VALUE, KEY),
    "key path dropped": add(RESIDUAL, VALUE, QUERY),
    "residual dropped": add(VALUE, KEY, QUERY),
    "weight transposed": add(RESIDUAL, mul(a(j, i), W_O(), W_V()), KEY, QUERY),
    "covariance transposed": add(RESIDUAL, VALUE, KEY, mul(delta(i, j), c, W_O(), transpose(symbols.cov(i)), W_Q())),
    "key weight for query weight": add(
        RESIDUAL, VALUE, mul(c, a(i, j), W_O(), sub(v(j), vbar(i)), transpose(mul(transpose(W_Q()), q(i)))), QUERY
    ),
    "one path twice": add(RESIDUAL, VALUE, VALUE, KEY, QUERY),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_wrong_jacobian(name):
    with pytest.raises(
        DerivationError, match=r"the sides differ at rational layer with T=3, D=3, d=2, H=1, seed 0, i="
    ):
        _step(PLANTED[name]).check()


def test_the_claim_that_a_hard_mask_removes_the_query_path_is_caught():
    """At T=2 the claim holds; it fails as soon as two other keys are visible."""
    claim = _step(eye, lhs=Partial(out(i), x(i)))
    with pytest.raises(DerivationError, match="T=3"):
        claim.check(Layer(hidden="diagonal"))
    claim.check(Layer(hidden="diagonal"), length=2)


def test_the_claim_that_the_key_path_has_a_row_sum_is_caught():
    zero = sympy.ZeroMatrix(symbols.D, symbols.D)
    row = total(attention.key_block(), j)
    _step(zero, lhs=row).check()
    with pytest.raises(DerivationError, match="the sides differ"):
        _step(mul(W_O(), W_V()), lhs=row).check()


def test_rotary_key_path_has_a_row_sum():
    gain = transpose(mul(transpose(W_K()), transpose(symbols.rotation(j)), symbols.rotation(i), q(i)))
    row = total(mul(c, a(i, j), W_O(), sub(v(j), vbar(i)), gain), j)
    with pytest.raises(DerivationError, match="the sides differ"):
        _step(sympy.ZeroMatrix(symbols.D, symbols.D), lhs=row).check(Layer(rotary=True))


@pytest.mark.parametrize(
    ("lhs", "rhs", "rule"),
    [
        (norm(add(VALUE, KEY)), norm(KEY), rules.TRIANGLE),  # a term is lost
        (norm(VALUE) + norm(KEY), norm(add(VALUE, KEY)), rules.TRIANGLE),  # turned round
        (norm(W_O()) * norm(W_V()), norm(mul(W_O(), W_V())), rules.SUBMULTIPLICATIVE),  # turned round
        (norm(mul(W_O(), W_V())), norm(W_O()) + norm(W_V()), rules.SUBMULTIPLICATIVE),  # sum for product
        (norm(mul(W_O(), W_V())), norm(W_O()), rules.SUBMULTIPLICATIVE),
        (-norm(add(VALUE, KEY)), -norm(VALUE) - norm(KEY), rules.TRIANGLE),  # falls where it must grow
        (norm(x(l)), symbols.R / 2, rules.BALL),
        (norm(q(l)), symbols.R, rules.BALL),  # a query is no token
        (1 - a(i, i), 1 - 2 * a(i, i), rules.NONNEGATIVE),
        (norm(mul(W_O(), W_V())), 10**9 * norm(W_O()), rules.DEFINITION),  # true nearly always, but no rule
        (expressions.Inner(x(i), x(j)), norm(x(i)), rules.CAUCHY_SCHWARZ),
        (a(i, j), 1 / (1 + (T - 1) * sympy.exp(symbols.R)), rules.BOUND),
    ],
)
def test_inequalities_without_the_pattern_of_their_rule(lhs, rhs, rule):
    with pytest.raises(DerivationError, match="not an upper bound that the rule gives"):
        Step(lhs, "<=", rhs, rule).check(Layer(exchangeable=True))


def test_an_inequality_with_a_pattern_that_lies_is_falsified():
    """The search finds a counterexample even where the rule itself is wrong."""
    lie = rules.Rule("lie", "everything is small", lambda lhs, rhs, cited: iter([rhs]))
    for lhs, rhs in [
        (norm(mul(W_O(), W_V())), norm(mul(W_V(), W_O()))),
        (norm(sub(v(j), vbar(i))), norm(v(j))),
        (a(i, j), 1 / T),
        (norm(symbols.token_cov(i)), symbols.R**2 / 2),
        (norm(sub(x(j), symbols.xbar(i))), sympy.Rational(3, 2) * symbols.R),
    ]:
        with pytest.raises(DerivationError, match=r"<= .* is false at float layer"):
            Step(lhs, "<=", rhs, lie).check()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (sympy.Derivative(sympy.exp(beta) / (sympy.exp(beta) + T - 1), beta), 1 / T),
        (sympy.Limit(T * sympy.exp(beta) / (sympy.exp(beta) + T - 1), T, sympy.oo), sympy.S.One),
        (sympy.exp(beta) / (sympy.exp(beta) + T - 1), sympy.exp(beta) / (sympy.exp(beta) + T)),
    ],
)
def test_wrong_functions_of_the_penalty(left, right):
    with pytest.raises(DerivationError, match="they differ by"):
        Step(left, "=", right, rules.CALCULUS).check()


def test_abstract_proofs_catch_what_is_wrong_for_some_length():
    """Right at T=2 only: no concrete layer is needed to see it."""
    from theory import abstract

    step = softmax.derivative().steps[4]
    assert abstract.equal(step.lhs, step.rhs)
    assert not abstract.equal(step.lhs, delta(j, symbols.k) * a(i, j) + a(i, j) * a(i, symbols.k))


# -- links and citations -----------------------------------------------------------------------------------------------


def _chain() -> list[Step]:
    return list(attention.key_path().steps)


def _derivation(steps, **fields) -> Derivation:
    return Derivation("planted", "Planted", tuple(steps), **fields)


def test_error_names_derivation_step_and_counterexample():
    steps = _chain()
    wrong = mul(-1, steps[1].rhs)
    steps[1], steps[2] = replace(steps[1], rhs=wrong), replace(steps[2], lhs=wrong)
    text = (
        r"^derivation 'planted', step 2 \(linearity\): the sides differ at rational layer with T=3, D=3, d=2, H=1, "
        r"seed 0, i=1, j=1: entry \(1, 1\) is -?\d+(/\d+)? on the left and -?\d+(/\d+)? on the right\.$"
    )
    with pytest.raises(DerivationError, match=text):
        _derivation(steps).check()


def test_steps_that_do_not_link():
    steps = _chain()
    with pytest.raises(DerivationError, match="step 2 does not go on from step 1"):
        _derivation([steps[0], *steps[2:]]).check()


def test_no_steps():
    with pytest.raises(DerivationError, match="it has no steps"):
        _derivation([]).check()


def test_chain_without_a_label():
    with pytest.raises(DerivationError, match="every chain must start with a label of its own"):
        _derivation([replace(_chain()[0], label="")]).check()


def test_chain_that_nothing_uses():
    steps = [*attention.value_path().steps, *_chain()]
    with pytest.raises(DerivationError, match=r"the chains \['value path'\] are neither used nor results"):
        _derivation(steps).check()
    _derivation(steps, results=("value path",)).check()


def test_citation_of_an_unknown_chain():
    steps = _chain()
    steps[1] = replace(steps[1], uses=("nowhere",))
    with pytest.raises(DerivationError, match="it cites 'nowhere', which no earlier chain is called"):
        _derivation(steps).check()


def test_citation_of_what_does_not_occur():
    steps = _chain()
    steps[1] = replace(steps[1], uses=(variants.layer_norm().result("definition"),))
    with pytest.raises(
        DerivationError, match="it cites 'layer-norm: definition', but neither side of that result occurs"
    ):
        _derivation(steps).check()


def test_a_chain_cannot_cite_itself():
    steps = _chain()
    steps[0] = replace(steps[0], uses=("key path",))
    with pytest.raises(DerivationError, match="no earlier chain"):
        _derivation(steps).check()
    steps = _chain()
    steps[2] = replace(steps[2], uses=("key path",))
    with pytest.raises(DerivationError, match="no earlier chain"):
        _derivation(steps).check()


def test_unknown_relation_shapes_and_empty_statements():
    with pytest.raises(DerivationError, match=r"the relation must be one of \('=', '<='\), not '<'"):
        _step(VALUE, relation="<").check()
    with pytest.raises(DerivationError, match="the sides have different shapes"):
        _step(W_O()).check()
    with pytest.raises(DerivationError, match="both sides are the same formula"):
        _step(VALUE, lhs=VALUE).check()


def test_a_step_that_is_nowhere_compared():
    with pytest.raises(DerivationError, match="it has a value nowhere, so nothing was compared"):
        _step(VALUE, where=[Ne(i, j), sympy.Eq(i, j, evaluate=False)]).check()


def test_unknown_chain():
    with pytest.raises(DerivationError, match="derivation 'key' has no chain 'x'; it has key path"):
        attention.key_path().result("x")


def test_builder_links_steps():
    steps = Builder().start("one", VALUE).eq(add(VALUE, KEY), rules.CITE).eq(KEY, rules.CITE).steps
    assert [step.label for step in steps] == ["one", ""]
    assert steps[1].lhs == steps[0].rhs


# -- inequalities under Hypothesis -------------------------------------------------------------------------------------

INEQUALITIES = [
    (found, step)
    for found in ALL
    for step in found.steps
    if step.relation == "<=" and not step.lhs.has(Expectation) and (step.lhs.has(Norm) or step.rhs.has(Norm))
]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    which=st.integers(0, len(INEQUALITIES) - 1),
    seed=st.integers(0, 10**6),
    regime=st.sampled_from(sorted(samples.REGIMES)),
)
def test_inequalities_hold_on_random_and_extreme_layers(which, seed, regime):
    found, step = INEQUALITIES[which]
    instance = samples.floating(found.layer, seed, regime)
    for at in environments(instance, step.lhs, step.rhs, *step.where):
        if all(module._holds(condition, at) for condition in step.where):
            module._compare(step, instance, at)


def test_uniform_weight_in_numbers():
    """The published penalty on twelve steps hardly moves the diagonal weight."""
    from theory.regularised import uniform_weight

    weight = float(uniform_weight().subs({beta: -0.05, T: 12}))
    scores = torch.zeros(12, dtype=torch.float64)
    scores[0] = -0.05
    assert weight == pytest.approx(float(torch.softmax(scores, 0)[0]), rel=1e-12)
    assert weight == pytest.approx(1 / 12, rel=0.05)
