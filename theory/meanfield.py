r"""The law of large T for Gaussian tokens: softmax tilts the Gaussian, and everything else is a Gaussian integral.

The derivation is written along one direction, where every step is an integral that SymPy does; ``check_dimension``
checks the same identities with matrices, component by component. ``sensitivity.bounds.law`` evaluates the result on
layers.

>>> tilting().check()
>>> check_dimension(2)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import sympy
from sympy import Integral, Matrix, Symbol, exp, gamma, oo, pi, sqrt, symbols

from theory import rules
from theory.derivation import Builder, Derivation

x, m, w, v = symbols("x m w v", real=True)
xi = Symbol("xi", real=True)
S, Z, p, t = symbols("S Z p t", positive=True)
kappa = Symbol("kappa", negative=True)
order = Symbol("n", integer=True, positive=True)
M, N = symbols("M_h M_g", real=True)

GAUSSIAN = "tokens i.i.d. $N(m, S)$"


def density(value: Any, mean: Any = m, variance: Any = S) -> Any:
    """The Gaussian density."""
    return exp(-((value - mean) ** 2) / (2 * variance)) / sqrt(2 * pi * variance)


@cache
def tilting() -> Derivation:
    """Under softmax weights Gaussian tokens are Gaussian again, shifted by the covariance times the score gradient."""
    build = Builder()
    build.start("square", -((x - m) ** 2) / (2 * S) + w * x)
    build.eq(-((x - m - S * w) ** 2) / (2 * S) + w * m + S * w**2 / 2, rules.COLLECT)
    build.start("normaliser", Integral(density(x) * exp(w * x), (x, -oo, oo)))
    build.eq(exp(w * m + S * w**2 / 2), rules.CALCULUS)
    tilted = density(x) * exp(w * x) / exp(w * m + S * w**2 / 2)
    build.start("tilted density", tilted).eq(density(x, m + S * w), rules.COLLECT)
    build.start("tilted mean", Integral(x * density(x, m + S * w), (x, -oo, oo))).eq(m + S * w, rules.CALCULUS)
    build.start("tilted variance", Integral((x - m - S * w) ** 2 * density(x, m + S * w), (x, -oo, oo)))
    build.eq(S, rules.CALCULUS)
    return build.done(
        "tilting",
        "Softmax tilts a Gaussian",
        "With many tokens the weighted average over the keys of row i is an average over the density times "
        "$e^{wx}$, divided by its integral, with $w = w_i$ the gradient of the row's scores. Completing the "
        "square gives a Gaussian with the same covariance and the mean $m + S w_i$. So the covariance of the keys "
        "under the weights of any row is $S$, and the "
        r"query path of a diagonal block tends to $c \sum_h W_O W_V S W_K^\top W_Q$ for every i.",
        assumptions=(GAUSSIAN, r"$T \to \infty$"),
        results=("square", "normaliser", "tilted density", "tilted mean", "tilted variance"),
    )


@cache
def second_moment() -> Derivation:
    """The second moment of a block off the diagonal, for one pair of heads with gradients w and v."""
    build = Builder()
    one = exp(w * m + S * w**2 / 2)
    two = exp(v * m + S * v**2 / 2)
    both = Integral(density(x) * exp((w + v) * x), (x, -oo, oo))
    build.start("weights", both / (one * two)).eq(exp(S * w * v), rules.CALCULUS)
    joint = density(x) * exp((w + v) * x) / (one * two * exp(S * w * v))
    build.start("token", joint).eq(density(x, m + S * (w + v)), rules.COLLECT)
    first, second = M * (1 + (S * v + xi) * w), N * (1 + (S * w + xi) * v)
    noise = density(xi, 0, S)
    build.start("bracket", Integral(first * second * noise, (xi, -oo, oo)))
    build.eq(M * N * (1 + 2 * S * w * v + (S + S**2 * w * v) * w * v), rules.CALCULUS)
    return build.done(
        "second-moment",
        "The second moment off the diagonal",
        "$T^2 a^h_{ij} a^g_{ij}$ tends to $e^{wx_j + vx_j}$ over both normalisers; its mean is $e^{S w v}$, and "
        "it tilts $x_j$ to the mean $m + S(w + v)$. Head h subtracts its own mean $m + S w$, so its block is $M_h "
        r"(1 + (S v + \xi) w)$ with $\xi \sim N(0, S)$, and head g's likewise. The mean of the product, with "
        "matrices, is "
        r"$\langle M_h,M_g\rangle+(M_hSv)^\top M_gw+(M_gSw)^\top M_hv"
        r"+(\mathrm{tr}(M_hSM_g^\top)+(M_hSv)^\top M_gSw)\,w^\top v$.",
        assumptions=(GAUSSIAN, r"$T \to \infty$"),
        results=("weights", "token", "bracket"),
    )


@cache
def query_average() -> Derivation:
    """The average over the query token, and where it stops being finite."""
    build = Builder()
    build.start("average", Integral(density(x, 0, 1) * exp(kappa * x**2), (x, -oo, oo)))
    build.eq(1 / sqrt(1 - 2 * kappa), rules.CALCULUS)
    return build.done(
        "query-average",
        "The average over the query token",
        r"The exponent $w_h^\top S w_g$ is quadratic in the query token, $w_h = N_h x_i + n_h$, so averaging over "
        r"it is a Gaussian integral: along an eigenvector with value $\kappa$ it gives $(1 - 2\kappa)^{-1/2}$ "
        r"(proved here for $\kappa < 0$, and by continuation up to $\frac12$). At $\kappa \ge \frac12$ it "
        "diverges: rare query tokens with long score gradients "
        "carry the second moment, and the root mean square falls more slowly than $1/T$, although a typical row "
        "falls as $1/T$.",
        assumptions=(GAUSSIAN, r"largest eigenvalue of $N_h^\top S N_h$ in whitened coordinates below $\frac12$"),
        results=("average",),
    )


@cache
def finite_length() -> Derivation:
    """The step that makes moments of softmax weights products at every finite T."""
    build = Builder()
    build.start("denominator", Integral(t ** (order - 1) * exp(-t * Z), (t, 0, oo)) / gamma(order))
    build.eq(Z ** (-order), rules.CALCULUS)
    build.start("weight", Integral(t * p**2 * exp(-t * (p + Z)), (t, 0, oo)))
    build.eq(p**2 / (p + Z) ** 2, rules.CALCULUS)
    return build.done(
        "finite-length",
        "The softmax denominator as an integral",
        r"With $Z = \sum_l e^{z_l}$ and independent scores, $E\prod_l f_l(z_l)/Z^n$ becomes one integral over t of "
        "a product of "
        r"one-dimensional expectations $E f_l(z) e^{-t e^z}$: exact at every T.",
        assumptions=(r"$Z > 0$",),
        results=("denominator", "weight"),
    )


def derivations() -> tuple[Derivation, ...]:
    """The derivations of the law."""
    return tilting(), second_moment(), query_average(), finite_length()


def check_dimension(dim: int) -> None:
    """Checks the matrix forms of tilting and of the bracket with symbolic components.

    Args:
        dim: width of the tokens; 2 or 3 take seconds.

    Raises:
        ValueError: a form is wrong; the message names it.
    """
    root = Matrix(dim, dim, lambda r, s: Symbol(f"L{r}{s}", positive=True) if r >= s else 0)
    cov = root * root.T
    token, mean, first, second = (Matrix(dim, 1, symbols(f"{name}:{dim}", real=True)) for name in ("x", "m", "w", "v"))
    shift = token - mean
    inverse = cov.inv()
    left = -(shift.T * inverse * shift)[0] / 2 + (first.T * token)[0]
    moved = shift - cov * first
    right = -(moved.T * inverse * moved)[0] / 2 + (first.T * mean)[0] + (first.T * cov * first)[0] / 2
    if sympy.simplify(left - right) != 0:
        raise ValueError("completing the square fails")
    if sympy.expand(_bracket(dim, root, first, second) - _claimed(dim, cov, first, second)) != 0:
        raise ValueError("the mean of the bracket is not what is claimed")


def _maps(dim: int) -> tuple[Matrix, Matrix]:
    return tuple(Matrix(dim, dim, symbols(f"{name}:{dim * dim}", real=True)) for name in ("a", "b"))


def _bracket(dim: int, root: Matrix, first: Matrix, second: Matrix) -> Any:
    """Mean of <M_h (I + (S v + L z) w^T), M_g (I + (S w + L z) v^T)> over standard normal z."""
    cov, noise = root * root.T, Matrix(dim, 1, symbols(f"z:{dim}", real=True))
    one, two = _maps(dim)
    unit = sympy.eye(dim)
    left = one * (unit + (cov * second + root * noise) * first.T)
    right = two * (unit + (cov * first + root * noise) * second.T)
    product = sympy.Poly(sympy.expand(sum(left.multiply_elementwise(right))), *noise)
    moments = {0: 1, 1: 0, 2: 1}
    return sum(
        coefficient * sympy.prod([moments[power] for power in powers]) for powers, coefficient in product.terms()
    )


def _claimed(dim: int, cov: Matrix, first: Matrix, second: Matrix) -> Any:
    one, two = _maps(dim)
    constant = sum(one.multiply_elementwise(two))
    cross = (one * cov * second).dot(two * first) + (two * cov * first).dot(one * second)
    spread = (one * cov * two.T).trace() + (one * cov * second).dot(two * cov * first)
    return constant + cross + spread * first.dot(second)
