"""Regularised diagonals: what a hard mask, a finite penalty, and dropout do to the block Jacobian."""

from __future__ import annotations

from functools import cache
from typing import Any

from sympy import Derivative, Expr, Limit, Ne, S, Subs, Symbol, exp, log, oo

from theory import attention, rules, softmax
from theory.attention import D_IJ, gain, query_core
from theory.derivation import Builder, Derivation
from theory.expressions import MatrixSlope, Partial, Slope, add, delta, mul, sub, total, transpose
from theory.layer import Layer
from theory.symbols import (
    W_K,
    W_O,
    W_Q,
    W_V,
    T,
    a,
    b,
    b_O,
    beta,
    c,
    cov,
    cov_rest,
    eye,
    h,
    i,
    j,
    kbar,
    key,
    krest,
    l,
    mult,
    o,
    out,
    p,
    q,
    s,
    v,
    vbar,
    vrest,
    x,
)

MASKED = Layer(hidden="diagonal")
PAPER = "Regularised variants of arXiv:2602.10956."


def split_block(weight: Any, head: Symbol | None = None, rest: Any = None, both: Any = None) -> Any:
    """The three paths on the diagonal as a function of one number, the diagonal weight.

    Args:
        weight: the diagonal weight.
        head: the head, or None for one head.
        rest: how to write ``1 - weight``.
        both: how to write ``weight (1 - weight)``.
    """
    rest = 1 - weight if rest is None else rest
    both = weight * rest if both is None else both
    apart = sub(v(i, head), vrest(i, head))
    keys = transpose(sub(key(i, head), krest(i, head)))
    spread = add(mul(rest, cov_rest(i, head)), mul(both, apart, keys))
    return add(
        mul(weight, W_O(head), W_V(head)),
        mul(c, both, W_O(head), apart, gain(head)),
        mul(c, W_O(head), spread, W_Q(head)),
    )


@cache
def leave_one_out() -> Derivation:
    """The diagonal block as a function of the diagonal weight alone."""
    build = Builder()
    others, rest = total(exp(s(i, l)), l, i), Ne(i, j)
    build.start("masked weight", b(i, j), where=[rest]).eq(exp(s(i, j)) / others, rules.DEFINITION)
    build.start("weight", a(i, j), where=[rest])
    build.eq(exp(s(i, j)) / total(exp(s(i, l)), l), rules.CITE, softmax.derivative().result("weight"))
    build.eq(others / total(exp(s(i, l)), l) * b(i, j), rules.CITE, "masked weight")
    build.eq((1 - a(i, i)) * b(i, j), rules.CITE, softmax.derivative().result("weight"))
    build.start("mean", vbar(i)).eq(total(mul(a(i, l), v(l)), l), rules.DEFINITION)
    build.eq(add(mul(a(i, i), v(i)), total(mul(1 - a(i, i), b(i, l), v(l)), l, i)), rules.CITE, "weight")
    build.eq(add(mul(a(i, i), v(i)), mul(1 - a(i, i), vrest(i))), rules.DEFINITION)
    build.start("deviation", sub(v(i), vbar(i)))
    build.eq(sub(v(i), add(mul(a(i, i), v(i)), mul(1 - a(i, i), vrest(i)))), rules.CITE, "mean")
    build.eq(mul(1 - a(i, i), sub(v(i), vrest(i))), rules.COLLECT)
    build.start("covariance", cov(i))
    build.eq(total(mul(a(i, l), sub(v(l), vbar(i)), transpose(sub(key(l), kbar(i)))), l), rules.DEFINITION)
    own = mul(a(i, i) * (1 - a(i, i)), sub(v(i), vrest(i)), transpose(sub(key(i), krest(i))))
    build.eq(add(mul(1 - a(i, i), cov_rest(i)), own), rules.CITE, "weight", "mean")
    build.start("block", Partial(out(i), x(i)))
    build.eq(add(eye, attention.diagonal_block()), rules.CITE, attention.heads().result("on the diagonal"))
    build.eq(add(eye, split_block(a(i, i))), rules.CITE, "deviation", "covariance")
    return build.done(
        "leave-one-out",
        "The diagonal weight alone",
        "Write $a^{\\setminus i}$ for the weights of row i without key i. Every regulariser of the diagonal acts "
        "through the "
        "single number $a_{ii}$: mean, covariance and diagonal block are explicit functions of it.",
        assumptions=("at least two visible keys",),
        results=("masked weight", "weight", "mean", "deviation", "covariance", "block"),
    )


@cache
def hard_mask() -> Derivation:
    """A hard diagonal mask: value and key path vanish on the diagonal, the query path does not."""
    build = Builder()
    build.start("weight", a(i, i)).eq(S.Zero, rules.DEFINITION)
    build.start("diagonal", Partial(out(i), x(i)))
    build.eq(add(eye, total(attention.diagonal_block(h), h)), rules.CITE, attention.heads().result("on the diagonal"))
    build.eq(add(eye, total(query_core(h), h)), rules.CASES, "weight")
    build.eq(add(eye, total(mul(c, W_O(h), cov_rest(i, h), W_Q(h)), h)), rules.DEFINITION)
    build.start("one head", Partial(out(i), x(i)))
    build.eq(add(eye, attention.diagonal_block()), rules.CITE, attention.heads().result("on the diagonal"))
    build.eq(add(eye, query_core()), rules.CASES, "weight")
    build.start("off the diagonal", Partial(out(i), x(j)), where=[Ne(i, j)])
    paths = total(add(attention.value_block(h), attention.key_block(h)), h)
    build.eq(paths, rules.CITE, attention.heads().result("off the diagonal"))
    return build.done(
        "mask",
        "A hard diagonal mask keeps the query path",
        "With $B_{ii}=-\\infty$ the weight $a_{ii}$ is zero, so the value path and the key path vanish on the "
        "diagonal. The "
        "query path does **not**: token i still decides, as the query, how row i weighs all other keys. This "
        "contradicts "
        "the paper, which says that a full mask suppresses the query part as well: what is left besides the "
        "residual is exactly "
        "$c\\sum_h W_O\\,\\mathrm{Cov}_i\\,W_Q$, over the other keys, and it does not shrink as T grows.",
        layer=MASKED,
        reference=PAPER,
        results=("diagonal", "one head"),
    )


@cache
def mask_of_two() -> Derivation:
    """With two tokens the masked row has one key, and the query path is zero."""
    build = Builder()
    build.start("two tokens", Partial(out(1), x(1)))
    build.eq(add(eye, query_core(None, 1)), rules.CITE, hard_mask().result("one head"))
    build.eq(eye, rules.CASES)
    return build.done(
        "mask-two-tokens",
        "Two tokens: where a hard mask leaves only the residual",
        "A masked row of two tokens sees a single key. A single weight is always 1, its covariance is zero, and "
        "the diagonal "
        "block is the identity.",
        layer=MASKED,
        length=2,
    )


@cache
def mask_of_three() -> Derivation:
    """With three tokens the masked query path in closed form: not zero."""
    build = Builder()
    build.start("three tokens", Partial(out(1), x(1)))
    build.eq(add(eye, query_core(None, 1)), rules.CITE, hard_mask().result("one head"))
    spread = total(mul(a(1, l), sub(v(l), vbar(1)), transpose(sub(key(l), kbar(1)))), l, 1)
    build.eq(add(eye, mul(c, W_O(), spread, W_Q())), rules.DEFINITION)
    pair = mul(c, a(1, 2) * a(1, 3), W_O(), sub(v(2), v(3)), transpose(sub(key(2), key(3))), W_Q())
    build.eq(add(eye, pair), rules.ROWS)
    return build.done(
        "mask-three-tokens",
        "Three tokens: the masked query path in the open",
        "A masked row of three tokens sees two keys. Its query path is a product of both weights and of what "
        "sets the two "
        "values and the two keys apart: zero only if the values agree, or the keys do, or a weight matrix kills them.",
        layer=MASKED,
        length=3,
    )


@cache
def penalty() -> Derivation:
    """A finite penalty beta on the diagonal logits: how weights and diagonal block move with it."""
    build = Builder()
    softened = softmax.derivative().result("derivative")
    build.start("diagonal weight", Slope(a(i, i), beta)).eq(Slope(a(i, i), s(i, i)), rules.CHAIN)
    build.eq(a(i, i) * (1 - a(i, i)), rules.CITE, softened)
    build.start("other weights", Slope(a(i, j), beta), where=[Ne(i, j)]).eq(Slope(a(i, j), s(i, i)), rules.CHAIN)
    build.eq(-a(i, j) * a(i, i), rules.CITE, softened)
    build.start("block", Partial(out(i), x(i)))
    build.eq(add(eye, split_block(a(i, i))), rules.CITE, leave_one_out().result("block"))
    build.start("slope of the block", MatrixSlope(split_block(a(i, i)), beta))
    build.eq(mul(a(i, i) * (1 - a(i, i)), _block_slope(a(i, i))), rules.PRODUCT, "diagonal weight")
    return build.done(
        "penalty",
        "A finite penalty",
        "A number $\\beta$ added to the diagonal logit (negative to weaken the diagonal) changes no formula, only "
        "$a_{ii}$. The masked weights, means and covariance do not depend on it, so the derivative of the "
        "diagonal block "
        "along $\\beta$ is explicit. The part $-cW_O\\mathrm{Cov}^{\\setminus i}_iW_Q$ has the other sign: a negative "
        "penalty **strengthens** this part of the query path while it weakens the value path.",
        layer=Layer(penalty=True),
        reference=PAPER,
        results=("diagonal weight", "other weights", "block"),
    )


def _block_slope(weight: Any) -> Any:
    apart = sub(v(i), vrest(i))
    keys = transpose(sub(key(i), krest(i)))
    return add(
        mul(W_O(), W_V()),
        mul(c, 1 - 2 * weight, W_O(), apart, gain()),
        mul(-1, c, W_O(), cov_rest(i), W_Q()),
        mul(c, 1 - 2 * weight, W_O(), apart, keys, W_Q()),
    )


def uniform_weight() -> Expr:
    """The diagonal weight under uniform logits and penalty beta: ``e^beta / (e^beta + T - 1)``."""
    return exp(beta) / (exp(beta) + T - 1)


@cache
def uniform() -> Derivation:
    """Uniform logits with a penalty: weights and diagonal block in closed form, with limits."""
    build, weight = Builder(), uniform_weight()
    whole = exp(s(i, i)) + total(exp(s(i, l)), l, i)
    build.start("diagonal weight", a(i, i)).eq(exp(s(i, i)) / whole, rules.DEFINITION).eq(weight, rules.CASES)
    build.start("other weights", a(i, j), where=[Ne(i, j)])
    build.eq(exp(s(i, j)) / whole, rules.DEFINITION).eq(1 / (exp(beta) + T - 1), rules.CASES)
    build.start("mean of the others", vrest(i)).eq(mul(1 / (T - 1), total(v(l), l, i)), rules.CASES)
    build.start("block", Partial(out(i), x(i)))
    build.eq(add(eye, split_block(a(i, i))), rules.CITE, leave_one_out().result("block"))
    whole = exp(beta) + T - 1
    written = split_block(weight, None, (T - 1) / whole, (T - 1) * exp(beta) / whole**2)
    build.eq(add(eye, written), rules.CITE, "diagonal weight")
    build.start("slope", Derivative(weight, beta)).eq(weight * (1 - weight), rules.CALCULUS)
    build.eq((T - 1) * exp(beta) / (exp(beta) + T - 1) ** 2, rules.COLLECT)
    build.start("slope without penalty", Subs(Derivative(weight, beta), beta, 0)).eq((T - 1) / T**2, rules.CALCULUS)
    build.start("no penalty", Subs(weight, beta, 0)).eq(1 / T, rules.CALCULUS)
    build.start("long input", Limit(weight, T, oo)).eq(S.Zero, rules.CALCULUS)
    build.start("rate", Limit(T * weight, T, oo)).eq(exp(beta), rules.CALCULUS)
    build.start("weight of the rest", Limit(1 - weight, T, oo)).eq(S.One, rules.CALCULUS)
    build.start("full mask", Limit(weight, beta, -oo)).eq(S.Zero, rules.CALCULUS)
    build.start("full sink", Limit(weight, beta, oo)).eq(S.One, rules.CALCULUS)
    alpha = Symbol("alpha", positive=True)
    needed = log(alpha * (T - 1) / (1 - alpha))
    build.start("weight held fixed", Subs(weight, beta, needed)).eq(alpha, rules.CALCULUS)
    names = [step.label for step in build.steps if step.label]
    return build.done(
        "uniform",
        "Uniform logits",
        "Where all logits of a row agree, the diagonal weight is $e^\\beta/(e^\\beta+T-1)$. For a fixed $\\beta$ "
        "it falls "
        "as $e^\\beta/T$, so in the limit of a long input the value and key path leave the diagonal by themselves and "
        "$J_{ii}\\to I + cW_O\\mathrm{Cov}^{\\setminus i}_iW_Q$, whatever the penalty. To hold the weight at "
        "$\\alpha$ the "
        "penalty must grow as $\\beta = \\log\\frac{\\alpha(T-1)}{1-\\alpha}$. The limit $\\beta\\to-\\infty$ is the "
        "hard mask.",
        assumptions=("the logits of row i are equal before the penalty", "at least two tokens"),
        layer=Layer(penalty=True, uniform=True),
        results=tuple(names),
    )


@cache
def dropout_logits() -> Derivation:
    """Dropout of the diagonal logit with probability p: the expected weights and the expected diagonal block."""
    build, weight = Builder(), leave_one_out().result("weight")
    build.start("expected weight", (1 - p) * a(i, j) + p * b(i, j), where=[Ne(i, j)])
    build.eq((1 - p) * a(i, j) + p * a(i, j) / (1 - a(i, i)), rules.CITE, weight)
    build.eq(a(i, j) * (1 + p * a(i, i) / (1 - a(i, i))), rules.COLLECT)
    masked = add(eye, mul(c, W_O(), cov_rest(i), W_Q()))
    build.start("expected block", add(mul(1 - p, Partial(out(i), x(i))), mul(p, masked)))
    build.eq(
        add(mul(1 - p, add(eye, split_block(a(i, i)))), mul(p, masked)), rules.CITE, leave_one_out().result("block")
    )
    apart, keys = sub(v(i), vrest(i)), transpose(sub(key(i), krest(i)))
    kept = (1 - p) * a(i, i)
    spread = add(mul(1 - kept, cov_rest(i)), mul(kept * (1 - a(i, i)), apart, keys))
    parts = (
        mul(kept, W_O(), W_V()),
        mul(c, kept * (1 - a(i, i)), W_O(), apart, gain()),
        mul(c, W_O(), spread, W_Q()),
    )
    build.eq(add(eye, *parts), rules.COLLECT)
    return build.done(
        "dropout-logits",
        "Dropout of the diagonal logit",
        "With probability p the diagonal logit is set to $-\\infty$, else it is left alone. The expected value "
        "path on the "
        "diagonal shrinks by exactly $1-p$; the weight that is set free goes to the other keys in proportion; "
        "and the query "
        "path over the other keys **grows**, from $1-a_{ii}$ to $1-(1-p)a_{ii}$ times "
        "$cW_O\\mathrm{Cov}^{\\setminus i}_iW_Q$.",
        assumptions=("one draw per row, independent of the tokens", "at least two tokens"),
        reference=PAPER,
        results=("expected weight",),
    )


@cache
def dropout_weights() -> Derivation:
    """A multiplier m_ij on the weights after the softmax."""
    build, row = Builder(), mul(transpose(q(i)), W_K())
    build.start("sampled block", Partial(out(i), x(j)))
    sent = total(mul(mult(i, l), a(i, l), W_O(), v(l)), l)
    build.eq(Partial(add(x(i), sent, b_O()), x(j)), rules.DEFINITION)
    values = total(mul(mult(i, l), a(i, l), W_O(), Partial(v(l), x(j))), l)
    weights = total(mul(mult(i, l), W_O(), v(l), Partial(a(i, l), x(j))), l)
    build.eq(add(Partial(x(i), x(j)), values, weights), rules.PRODUCT)
    key_part = mul(c, delta(l, j) - a(i, j), v(l), row)
    query_part = mul(D_IJ, c, v(l), transpose(sub(key(l), kbar(i))), W_Q())
    inside = add(mul(delta(l, j), W_V()), key_part, query_part)
    results = attention.residual().result(), attention.scores().result("value"), attention.scores().result("weight")
    build.eq(add(mul(D_IJ, eye), total(mul(mult(i, l) * a(i, l), W_O(), inside), l)), rules.CITE, *results)
    key_path = mul(c, a(i, j), W_O(), sub(mul(mult(i, j), v(j)), o(i)), gain())
    spread = total(mul(a(i, l), sub(mul(mult(i, l), v(l)), o(i)), transpose(key(l))), l)
    query_path = mul(D_IJ, c, W_O(), spread, W_Q())
    value_path = mul(mult(i, j) * a(i, j), W_O(), W_V())
    build.eq(add(mul(D_IJ, eye), value_path, key_path, query_path), rules.SIFT)
    return build.done(
        "dropout-weights",
        "Dropout of weights",
        "After the softmax the weights are multiplied by $m_{ij}$, which is 0 with probability p and $1/(1-p)$ "
        "otherwise; "
        "here $o_i=\\sum_j m_{ij}a_{ij}v_j$. Step 3 shows the block to be linear in m (besides the residual), "
        "with factors "
        "that m does not enter, so the **expected block is the block without dropout**: this kind of dropout "
        "adds spread to "
        "the Jacobian, but no bias. Even with $m_{ii}=0$ the key path stays on the diagonal, since the softmax "
        "still sees "
        "the diagonal score.",
        layer=Layer(multiplier=True),
        reference=PAPER,
    )


def derivations() -> tuple[Derivation, ...]:
    """The derivations about regularised diagonals."""
    return (
        leave_one_out(),
        hard_mask(),
        mask_of_two(),
        mask_of_three(),
        penalty(),
        uniform(),
        dropout_logits(),
        dropout_weights(),
    )
