"""The softmax: its derivative as an indexed sum with abstract T, what it does not see, and what a ball allows."""

from __future__ import annotations

from functools import cache

from sympy import Ne, S, exp

from theory import rules
from theory.derivation import Builder, Derivation
from theory.expressions import Expectation, Inner, Slope, delta, mul, norm, sub, total, transpose
from theory.layer import Layer
from theory.symbols import W_K, R, T, a, c, gap, i, j, k, key, l, q, s, t, x

NO_BIAS = Layer(exchangeable=True)


@cache
def derivative() -> Derivation:
    """``d a_ij / d s_ik = a_ij (delta_jk - a_ik)`` for every T."""
    whole = total(exp(s(i, l)), l)
    d_jk, d_lk = delta(j, k), delta(l, k)
    build = Builder()
    build.start("weight", a(i, j)).eq(exp(s(i, j)) / whole, rules.DEFINITION, abstract=True)
    build.start("derivative", Slope(a(i, j), s(i, k)))
    build.eq(Slope(exp(s(i, j)) / whole, s(i, k)), rules.CITE, "weight", abstract=True)
    top = d_jk * exp(s(i, j)) * whole - exp(s(i, j)) * total(d_lk * exp(s(i, l)), l)
    build.eq(top / whole**2, rules.QUOTIENT, abstract=True)
    build.eq((d_jk * exp(s(i, j)) * whole - exp(s(i, j)) * exp(s(i, k))) / whole**2, rules.SIFT, abstract=True)
    build.eq(d_jk * a(i, j) - a(i, j) * a(i, k), rules.CITE, "weight", abstract=True)
    build.eq(a(i, j) * (d_jk - a(i, k)), rules.COLLECT, abstract=True)
    build.start("sum of a row", total(a(i, j), j))
    build.eq(total(exp(s(i, j)) / whole, j), rules.CITE, "weight").eq(S.One, rules.SHIFT)
    build.start("sum over scores", total(Slope(a(i, j), s(i, k)), k))
    build.eq(total(a(i, j) * (d_jk - a(i, k)), k), rules.CITE, "derivative")
    build.eq(a(i, j) - a(i, j) * total(a(i, k), k), rules.SIFT).eq(S.Zero, rules.ROWS, "sum of a row")
    return build.done(
        "softmax",
        "The derivative of the softmax",
        "Row i of the attention weights is a softmax of the scores of row i, over all T keys. Raising one score "
        "raises its "
        "own weight and lowers every other weight of the row in proportion; raising all scores together changes "
        "nothing.",
        assumptions=("the weights of row i depend on the scores of row i only",),
        results=("weight", "derivative", "sum of a row", "sum over scores"),
    )


@cache
def shift() -> Derivation:
    """A number added to all scores of a row drops out."""
    whole = total(exp(s(i, l)), l)
    build = Builder()
    build.start("shift", exp(s(i, j) + t) / total(exp(s(i, l) + t), l))
    build.eq(exp(t) * exp(s(i, j)) / total(exp(t) * exp(s(i, l)), l), rules.COLLECT)
    build.eq(exp(s(i, j)) / whole, rules.SHIFT)
    build.eq(a(i, j), rules.CITE, derivative().result("weight"))
    return build.done(
        "shift",
        "What the softmax does not see",
        "A number added to every score of a row leaves its weights as they are. So a key bias has no effect at all: "
        "it adds $c \\langle q_i, b_K\\rangle$ to every score of row i.",
    )


@cache
def ball() -> Derivation:
    """Tokens in a ball of radius R: the logits of a row differ by at most ``2 R |w_i|``, and no weight is large."""
    w = mul(c, transpose(W_K()), q(i))
    build = Builder()
    build.start("gap", gap(i, j, l)).eq(s(i, j) - s(i, l), rules.DEFINITION)
    build.eq(c * Inner(q(i), sub(key(j), key(l))), rules.DEFINITION)
    build.eq(Inner(w, sub(x(j), x(l))), rules.COLLECT)
    build.le(norm(w) * norm(sub(x(j), x(l))), rules.CAUCHY_SCHWARZ)
    build.le(norm(w) * (norm(x(j)) + norm(x(l))), rules.TRIANGLE)
    build.le(2 * R * norm(w), rules.BALL)
    build.start("weight on a ball", a(i, j))
    build.eq(exp(s(i, j)) / total(exp(s(i, l)), l), rules.CITE, derivative().result("weight"))
    build.eq(1 / (1 + total(exp(-gap(i, j, l)), l, j)), rules.SHIFT)
    build.le(1 / (1 + total(exp(-2 * R * norm(w)), l, j)), rules.BOUND, "gap")
    build.eq(1 / (1 + (T - 1) * exp(-2 * R * norm(w))), rules.COLLECT)
    return build.done(
        "ball",
        "Softmax on a ball",
        "If no token is longer than R, the scores of a row cannot differ by more than $2R\\lVert w_i\\rVert$ with "
        "$w_i = cW_K^\\top q_i$. Every weight is then $O(1/T)$, whatever the tokens are.",
        assumptions=(r"$\lVert x_l\rVert \le R$ for every token", "no additive bias, no mask"),
        layer=NO_BIAS,
        results=("gap",),
    )


@cache
def exchangeable() -> Derivation:
    """Exchangeable tokens: ``E[a_ij] = (1 - E[a_ii]) / (T - 1)`` off the diagonal."""
    build = Builder()
    build.start("mean weight", (T - 1) * Expectation(a(i, j)), where=[Ne(i, j)])
    build.eq(total(Expectation(a(i, l)), l, i), rules.EXCHANGE)
    build.eq(Expectation(total(a(i, l), l, i)), rules.LINEAR)
    build.eq(Expectation(1 - a(i, i)), rules.ROWS)
    build.eq(1 - Expectation(a(i, i)), rules.LINEAR)
    build.le(S.One, rules.NONNEGATIVE)
    return build.done(
        "exchangeable",
        "The mean weight off the diagonal",
        "No uniform attention is assumed: symmetry alone gives $E[a_{ij}] = (1-E[a_{ii}])/(T-1) \\le 1/(T-1)$ "
        "for every "
        "pair off the diagonal. The check averages over every order of the tokens, exactly: each exchangeable law of T "
        "tokens is a mixture of such laws.",
        assumptions=("the tokens are exchangeable, without positional information", "no additive bias, no mask"),
        layer=NO_BIAS,
        reference="Expected form of Eq. (8) of arXiv:2602.10956, without its assumption of uniform weights.",
    )


def derivations() -> tuple[Derivation, ...]:
    """The derivations about the softmax alone."""
    return derivative(), shift(), ball(), exchangeable()
