"""Inequalities, one rule at a time: what limits a block when tokens lie in a ball."""

from __future__ import annotations

from functools import cache
from typing import Any

from sympy import Ne, Symbol

from theory import attention, rules, softmax
from theory.derivation import Builder, Derivation
from theory.expressions import Partial, add, mul, norm, sub, total, transpose
from theory.symbols import W_K, W_O, W_Q, W_V, R, a, c, cov, eye, h, i, j, l, out, q, token_cov, v, vbar, x, xbar

BALL = r"$\lVert x_l\rVert \le R$ for every token"


@cache
def covariance() -> Derivation:
    """The covariance of tokens in a ball of radius R is at most ``R^2``."""
    build, apart = Builder(), sub(x(l), xbar(i))
    build.start("mean", norm(xbar(i))).eq(norm(total(mul(a(i, l), x(l)), l)), rules.DEFINITION)
    build.le(total(a(i, l) * norm(x(l)), l), rules.TRIANGLE).le(total(a(i, l) * R, l), rules.BALL)
    build.eq(R * total(a(i, l), l), rules.LINEAR).eq(R, rules.ROWS, softmax.derivative().result("sum of a row"))
    build.start("covariance", norm(token_cov(i)))
    build.eq(norm(total(mul(a(i, l), apart, transpose(apart)), l)), rules.DEFINITION)
    build.le(total(a(i, l) * norm(mul(apart, transpose(apart))), l), rules.TRIANGLE)
    build.eq(total(a(i, l) * norm(apart) ** 2, l), rules.RANK_ONE)
    build.eq(total(a(i, l) * norm(x(l)) ** 2, l) - norm(xbar(i)) ** 2, rules.ROWS)
    build.le(total(a(i, l) * norm(x(l)) ** 2, l), rules.NONNEGATIVE)
    build.le(total(a(i, l) * R**2, l), rules.BALL)
    build.eq(R**2 * total(a(i, l), l), rules.LINEAR)
    build.eq(R**2, rules.ROWS, softmax.derivative().result("sum of a row"))
    return build.done(
        "covariance",
        "Mean and covariance in a ball",
        "Weighted means of tokens stay in the ball, and the weighted covariance is at most $R^2$ in spectral "
        "norm. Step 9 shows what is lost: $R^2-\\lVert\\bar x_i\\rVert^2$ holds as well.",
        assumptions=(BALL,),
        results=("mean", "covariance"),
    )


def _reach(head: Symbol | None = None) -> Any:
    """``|w_i|`` with ``w_i = c W_K^T q_i``, without c."""
    return norm(mul(transpose(W_K(head)), q(i, head)))


@cache
def local() -> Derivation:
    """The local bound off and on the diagonal."""
    build = Builder()
    build.start("off the diagonal", norm(Partial(out(i), x(j))), where=[Ne(i, j)])
    paths = total(add(attention.value_block(h), attention.key_block(h)), h)
    build.eq(norm(paths), rules.CITE, attention.heads().result("off the diagonal"))
    rank_one = mul(W_O(h), sub(v(j, h), vbar(i, h)), attention.gain(h))
    product, weight = norm(mul(W_O(h), W_V(h))), a(i, j, head=h)
    build.le(total(weight * product + c * weight * norm(rank_one), h), rules.TRIANGLE)
    push = norm(mul(W_O(h), sub(v(j, h), vbar(i, h))))
    build.eq(total(weight * (product + c * push * _reach(h)), h), rules.RANK_ONE)
    own, push_own = a(i, i, head=h), norm(mul(W_O(h), sub(v(i, h), vbar(i, h))))
    build.start("on the diagonal", norm(Partial(out(i), x(i))))
    build.eq(
        norm(add(eye, total(attention.diagonal_block(h), h))), rules.CITE, attention.heads().result("on the diagonal")
    )
    rank_one_own = norm(mul(W_O(h), sub(v(i, h), vbar(i, h)), attention.gain(h)))
    query = c * norm(mul(W_O(h), cov(i, h), W_Q(h)))
    build.le(1 + total(own * product + c * own * rank_one_own + query, h), rules.TRIANGLE)
    build.eq(1 + total(own * (product + c * push_own * _reach(h)) + query, h), rules.RANK_ONE)
    return build.done(
        "local-bound",
        "The local bound",
        "The blocks of the paths are bounded one by one. No assumption is made; everything on the right is known "
        "from one "
        "forward pass.",
        results=("off the diagonal", "on the diagonal"),
    )


def _diagonal(push: Any) -> Any:
    """The local bound on the diagonal, with ``push`` for ``|W_O (v_i - vbar_i)|``."""
    product, query = norm(mul(W_O(h), W_V(h))), c * norm(mul(W_O(h), cov(i, h), W_Q(h)))
    return 1 + total(a(i, i, head=h) * (product + c * push * _reach(h)) + query, h)


@cache
def on_a_ball() -> Derivation:
    """The bounds that need only the weights a_ij, for tokens in a ball."""
    build = Builder()
    product = norm(mul(W_O(h), W_V(h)))
    apart = norm(sub(x(j), xbar(i, h)))
    form, weight = attention.biases().result("deviation of values"), a(i, j, head=h)
    build.start("deviation", norm(sub(x(j), xbar(i)))).le(norm(x(j)) + norm(xbar(i)), rules.TRIANGLE)
    build.le(2 * R, rules.BALL, covariance().result("mean"))
    build.start("off the diagonal", norm(Partial(out(i), x(j))), where=[Ne(i, j)])
    push = norm(mul(W_O(h), sub(v(j, h), vbar(i, h))))
    build.le(total(weight * (product + c * push * _reach(h)), h), rules.BOUND, local().result("off the diagonal"))
    push = norm(mul(W_O(h), W_V(h), sub(x(j), xbar(i, h))))
    build.eq(total(weight * (product + c * push * _reach(h)), h), rules.CITE, form)
    build.le(total(weight * (product + c * product * apart * _reach(h)), h), rules.SUBMULTIPLICATIVE)
    build.le(total(weight * (product + c * product * 2 * R * _reach(h)), h), rules.BOUND, "deviation")
    build.start("query path", norm(mul(W_O(), cov(i), W_Q())))
    build.eq(
        norm(mul(W_O(), W_V(), token_cov(i), transpose(W_K()), W_Q())),
        rules.CITE,
        attention.biases().result("covariance"),
    )
    metric = norm(mul(transpose(W_K()), W_Q()))
    build.le(norm(mul(W_O(), W_V())) * norm(token_cov(i)) * metric, rules.SUBMULTIPLICATIVE)
    build.le(norm(mul(W_O(), W_V())) * R**2 * metric, rules.BOUND, covariance().result("covariance"))
    own, metric = a(i, i, head=h), norm(mul(transpose(W_K(h)), W_Q(h)))
    build.start("on the diagonal", norm(Partial(out(i), x(i))))
    build.le(_diagonal(norm(mul(W_O(h), sub(v(i, h), vbar(i, h))))), rules.BOUND, local().result("on the diagonal"))
    build.eq(_diagonal(norm(mul(W_O(h), W_V(h), sub(x(i), xbar(i, h))))), rules.CITE, form)
    build.le(_diagonal(product * norm(sub(x(i), xbar(i, h)))), rules.SUBMULTIPLICATIVE)
    flat = own * (product + c * product * 2 * R * _reach(h)) + c * product * R**2 * metric
    build.le(1 + total(flat, h), rules.BOUND, "deviation", "query path")
    return build.done(
        "ball-bound",
        "The bounds on a ball",
        "Off the diagonal each head gives at most $a_{ij}\\lVert W_OW_V\\rVert(1+2R\\lVert w_i\\rVert)$, with "
        "$w_i=cW_K^\\top q_i$. With the mean weight (exchangeable tokens) or the worst weight (ball) this "
        "becomes a function "
        "of T alone, O(1/T). The query path is at most $cR^2\\lVert W_OW_V\\rVert\\lVert W_K^\\top W_Q\\rVert$ "
        "at every T.",
        assumptions=(BALL,),
        results=("deviation", "off the diagonal", "query path", "on the diagonal"),
    )


def derivations() -> tuple[Derivation, ...]:
    """The derivations of inequalities."""
    return covariance(), local(), on_a_ball()
