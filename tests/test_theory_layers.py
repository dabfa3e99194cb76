"""The small layers of the derivations compute what the real one does."""

from __future__ import annotations

import pytest
import sympy
import torch

import theory
from sensitivity.attention import SoftmaxAttention
from theory import attention, samples, symbols
from theory.evaluate import environments, value
from theory.expressions import add, delta, mul, sub, total
from theory.layer import Layer, Sizes
from theory.symbolic import Exponential
from theory.symbols import eye, h, i, j

RESIDUAL = mul(delta(i, j), eye)
LAYERS = {
    "plain": (Layer(), {}),
    "no residual": (Layer(residual=False), {}),
    "gate": (Layer(gated=True), {}),
    "causal": (Layer(hidden="causal"), {"causal": True}),
    "mask": (Layer(hidden="diagonal"), {"diagonal_bias": float("-inf")}),
    "penalty": (Layer(penalty=True), {}),
    "multiplier": (Layer(multiplier=True), {}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_formulas_agree_with_autograd(name):
    """The closed form of theory/, in doubles, against autograd of the layer that is measured."""
    layer, options = LAYERS[name]
    instance = samples.floating(layer, 3, "ordinary", Sizes(4, 3, 2, 2))
    p = instance.parameters
    weights = {
        f"{long}_weight": torch.tensor([head[f"W_{short}"] for head in p.heads], dtype=torch.float64)
        for long, short in (("query", "Q"), ("key", "K"), ("value", "V"), ("output", "O"))
    }
    biases = {
        f"{long}_bias": torch.tensor([head[f"b_{short}"] for head in p.heads], dtype=torch.float64)[..., 0]
        for long, short in (("query", "Q"), ("key", "K"), ("value", "V"))
    }
    if layer.penalty:
        options = {"diagonal_bias": p.scalars["beta"]}
    if layer.multiplier:
        options = {"multiplier": torch.tensor(p.m, dtype=torch.float64)}
    module = SoftmaxAttention(
        **weights,
        **biases,
        output_bias=torch.tensor(p.b_O, dtype=torch.float64)[:, 0],
        bias=torch.tensor(p.B, dtype=torch.float64),
        residual=p.scalars["gamma"] if layer.gated else layer.residual,
        scale=p.scalars["c"],
        **options,
    )
    tokens = torch.tensor(p.x, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda u: module(u[None])[0])(tokens).permute(0, 2, 1, 3)
    formula = theory.find("gate").result().rhs if layer.gated else attention.whole(layer.residual)
    if layer.multiplier:
        found = theory.find("dropout-weights").result("sampled block").rhs
        paths = total(symbols.with_head(sub(found, RESIDUAL)), h)
        formula = add(RESIDUAL, paths)
    for at in environments(instance, formula):
        block = torch.tensor(value(formula, instance, at), dtype=torch.float64)
        torch.testing.assert_close(block, jacobian[at[i], at[j]], rtol=1e-10, atol=1e-12)


def test_sympys_derivative_uses_the_true_exponential():
    """The oracle's exponential is SymPy's: its derivative of the forward map is that of the map with ``exp`` in it."""
    instance = samples.symbolic(Layer(), Sizes(2, 2, 1, 1), 5)
    state = instance.lifted("x").table["h"][0][0][0]
    variable = sympy.Symbol("x_1_1", real=True)
    place = {symbol: sympy.Rational(n, 7) for n, symbol in enumerate(sorted(state.free_symbols, key=str), start=1)}

    def true(expression):
        return expression.replace(Exponential, sympy.exp).subs(place)

    ours = true(sympy.diff(state, variable))
    theirs = sympy.diff(state.replace(Exponential, sympy.exp), variable).subs(place)
    assert abs(sympy.N(ours - theirs, 30)) < 1e-25
    assert abs(sympy.N(ours)) > 1e-6
