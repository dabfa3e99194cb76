"""The Jacobian of one attention layer: residual, value path, key path, query path, and their sum."""

from __future__ import annotations

from functools import cache
from typing import Any

from sympy import Ne, Symbol, ZeroMatrix

from theory import rules, softmax
from theory.derivation import Builder, Derivation
from theory.expressions import Partial, Slope, add, delta, mul, sub, total, transpose
from theory.symbols import (
    W_K,
    W_O,
    W_Q,
    W_V,
    D,
    a,
    b_K,
    b_O,
    b_Q,
    b_V,
    c,
    cov,
    eye,
    h,
    i,
    j,
    kbar,
    key,
    l,
    m,
    out,
    q,
    s,
    token_cov,
    v,
    vbar,
    x,
    xbar,
)

D_IJ = delta(i, j)


# -- the blocks, one per path: the formulas that everything else uses --------------------------------------------------


def value_block(head: Symbol | None = None, at: Any = j, query: Any = i) -> Any:
    """``a_ij W_O W_V``."""
    return mul(a(query, at, head=head), W_O(head), W_V(head))


def gain(head: Symbol | None = None, query: Any = i) -> Any:
    """``(W_K^T q_i)^T``: the direction along which row i compares keys."""
    return transpose(mul(transpose(W_K(head)), q(query, head)))


def key_block(head: Symbol | None = None, at: Any = j, query: Any = i) -> Any:
    """``c a_ij W_O (v_j - vbar_i) (W_K^T q_i)^T``."""
    deviation = sub(v(at, head), vbar(query, head))
    return mul(c, a(query, at, head=head), W_O(head), deviation, gain(head, query))


def query_core(head: Symbol | None = None, query: Any = i) -> Any:
    """``c W_O Cov_i W_Q``: the query path where it lives, on the diagonal."""
    return mul(c, W_O(head), cov(query, head), W_Q(head))


def query_block(head: Symbol | None = None) -> Any:
    """``delta_ij c W_O Cov_i W_Q``."""
    return mul(D_IJ, query_core(head))


def diagonal_block(head: Symbol | None = None, query: Any = i) -> Any:
    """The three paths of one head at j = i."""
    return add(value_block(head, query, query), key_block(head, query, query), query_core(head, query))


def value_start(head: Symbol | None = None) -> Any:
    """The value path before any work: weights held fixed, values differentiated."""
    return total(mul(a(i, l, head=head), W_O(head), Partial(v(l, head), x(j))), l)


def weight_start(head: Symbol | None = None) -> Any:
    """The weight path before any work: values held fixed, weights differentiated."""
    return total(mul(W_O(head), v(l, head), Partial(a(i, l, head=head), x(j))), l)


# -- the derivations ---------------------------------------------------------------------------------------------------


@cache
def scores() -> Derivation:
    """How queries, keys, values, scores and weights depend on a token."""
    build = Builder()
    for label, vector, weight, bias in (("query", q, W_Q, b_Q), ("key", key, W_K, b_K), ("value", v, W_V, b_V)):
        build.start(label, Partial(vector(l), x(j)))
        build.eq(Partial(add(mul(weight(), x(l)), bias()), x(j)), rules.DEFINITION).eq(
            mul(delta(l, j), weight()), rules.LINEAR
        )
    build.start("score", Partial(s(i, m), x(j)))
    inner = mul(c, add(mul(transpose(q(i)), Partial(key(m), x(j))), mul(transpose(key(m)), Partial(q(i), x(j)))))
    build.eq(inner, rules.PRODUCT)
    in_key = mul(delta(m, j), transpose(q(i)), W_K())
    in_query = mul(D_IJ, transpose(key(m)), W_Q())
    build.eq(mul(c, add(in_key, in_query)), rules.CITE, "key", "query")
    build.start("weight", Partial(a(i, l), x(j)))
    build.eq(total(mul(Slope(a(i, l), s(i, m)), Partial(s(i, m), x(j))), m), rules.CHAIN)
    softened = mul(a(i, l), delta(l, m) - a(i, m))
    build.eq(total(mul(softened, Partial(s(i, m), x(j))), m), rules.CITE, softmax.derivative().result("derivative"))
    build.eq(total(mul(softened, c, add(in_key, in_query)), m), rules.CITE, "score")
    key_part = mul(c, a(i, l), delta(l, j) - a(i, j), transpose(q(i)), W_K())
    query_part = mul(D_IJ, c, a(i, l), transpose(sub(key(l), kbar(i))), W_Q())
    build.eq(add(key_part, query_part), rules.SIFT)
    return build.done(
        "scores",
        "From a token to scores and weights",
        "A token enters as a key of its own column and as the query of its own row. The first changes one score "
        "in every "
        "row; the second changes every score of one row, which is why the query part lives on the diagonal only.",
        results=("query", "key", "value", "score", "weight"),
    )


@cache
def value_path() -> Derivation:
    """Value path: ``a_ij W_O W_V``."""
    build = Builder().start("value path", value_start())
    build.eq(total(mul(a(i, l), W_O(), delta(l, j), W_V()), l), rules.CITE, scores().result("value"))
    build.eq(value_block(), rules.SIFT)
    return build.done(
        "value",
        "Value path",
        "The weights are held fixed and the values differentiated: what is sent, at the rate the weights say. "
        "This is the "
        "first term of the split in the paper.",
    )


@cache
def key_path() -> Derivation:
    """Key path: ``c a_ij W_O (v_j - vbar_i) (W_K^T q_i)^T``."""
    row = mul(transpose(q(i)), W_K())
    build = Builder()
    build.start("key path", total(mul(W_O(), v(l), c, a(i, l), delta(l, j) - a(i, j), row), l))
    spread = sub(mul(c, a(i, j), W_O(), v(j), row), total(mul(c, a(i, j), a(i, l), W_O(), v(l), row), l))
    build.eq(spread, rules.SIFT)
    mean = total(mul(a(i, l), v(l)), l)
    build.eq(mul(c, a(i, j), W_O(), sub(v(j), mean), row), rules.LINEAR)
    build.eq(mul(c, a(i, j), W_O(), sub(v(j), vbar(i)), row), rules.DEFINITION)
    build.eq(key_block(), rules.COLLECT)
    return build.done(
        "key",
        "Key path",
        "Token j changes the score that query i gives it. More weight on j means less on all others, so the "
        "output moves "
        "along $v_j - \\bar v_i$: a block of rank one per head. It vanishes where $v_j$ is already the mean.",
    )


@cache
def query_path() -> Derivation:
    """Query path: ``delta_ij c W_O Cov_i W_Q``, on the diagonal only."""
    build = Builder()
    centred_key = transpose(sub(key(l), kbar(i)))
    build.start("query path", total(mul(W_O(), v(l), D_IJ, c, a(i, l), centred_key, W_Q()), l))
    build.eq(mul(D_IJ, c, W_O(), total(mul(a(i, l), v(l), centred_key), l), W_Q()), rules.LINEAR)
    centred = mul(a(i, l), sub(v(l), vbar(i)), centred_key)
    build.eq(mul(D_IJ, c, W_O(), total(centred, l), W_Q()), rules.ROWS)
    build.eq(query_block(), rules.DEFINITION)
    return build.done(
        "query",
        "Query path",
        "Token i is also the query of its own row: it moves all scores of the row at once. What comes out is the "
        "covariance "
        "of values and keys under the row's weights, over all keys and not only over key i.",
    )


@cache
def weight_path() -> Derivation:
    """Weight path = key path + query path."""
    build = Builder().start("weight path", weight_start())
    key_part = mul(c, a(i, l), delta(l, j) - a(i, j), transpose(q(i)), W_K())
    query_part = mul(D_IJ, c, a(i, l), transpose(sub(key(l), kbar(i))), W_Q())
    build.eq(total(mul(W_O(), v(l), add(key_part, query_part)), l), rules.CITE, scores().result("weight"))
    split = add(key_path().result().lhs, query_path().result().lhs)
    build.eq(split, rules.LINEAR)
    build.eq(add(key_block(), query_block()), rules.CITE, key_path().result(), query_path().result())
    return build.done(
        "weight",
        "Weight path",
        "The values are held fixed and the weights differentiated. The softmax makes it fall apart into a part through "
        "token j as a key and a part through token i as the query.",
    )


@cache
def residual() -> Derivation:
    """Residual path: ``delta_ij I``."""
    build = Builder().start("residual", Partial(x(i), x(j))).eq(mul(D_IJ, eye), rules.LINEAR)
    return build.done("residual", "Residual", "The token is added to its own output, unchanged.")


@cache
def one_head() -> Derivation:
    """The four paths of one head add up to the Jacobian."""
    build = Builder().start("one head", Partial(out(i), x(j)))
    sent = total(mul(a(i, l), W_O(), v(l)), l)
    build.eq(Partial(add(x(i), sent, b_O()), x(j)), rules.DEFINITION)
    build.eq(add(Partial(x(i), x(j)), value_start(), weight_start()), rules.PRODUCT)
    citations = residual().result(), value_path().result(), weight_path().result()
    build.eq(add(mul(D_IJ, eye), value_block(), key_block(), query_block()), rules.CITE, *citations)
    return build.done(
        "one-head",
        "The whole block of one head",
        "Residual, value path, key path and query path add up to the exact block $J_{ij}=\\partial h_i/\\partial x_j$. "
        "The first and the last live on the diagonal only.",
        reference="Completes Eq. (5) of arXiv:2602.10956.",
    )


@cache
def heads() -> Derivation:
    """Several heads: the residual once, and the three other paths summed over heads."""
    build = Builder().start("heads", Partial(out(i), x(j)))
    sent = total(total(mul(a(i, l, head=h), W_O(h), v(l, h)), l), h)
    build.eq(Partial(add(x(i), sent, b_O()), x(j)), rules.DEFINITION)
    build.eq(add(Partial(x(i), x(j)), total(add(value_start(h), weight_start(h)), h)), rules.PRODUCT)
    citations = residual().result(), value_path().result(), weight_path().result()
    build.eq(whole(), rules.CITE, *citations)
    on = add(eye, total(diagonal_block(h), h))
    build.start("on the diagonal", Partial(out(i), x(i))).eq(on, rules.CASES, "heads")
    off = total(add(value_block(h), key_block(h)), h)
    build.start("off the diagonal", Partial(out(i), x(j)), where=[Ne(i, j)])
    build.eq(whole(), rules.CITE, "heads").eq(off, rules.CASES)
    return build.done(
        "heads",
        "Several heads",
        "Heads do not see each other inside the layer: their blocks add up, and the residual is there once.",
        results=("heads", "on the diagonal", "off the diagonal"),
    )


def whole(residual_path: bool = True) -> Any:
    """The whole block, for several heads."""
    paths = total(add(value_block(h), key_block(h), query_block(h)), h)
    return add(mul(D_IJ, eye), paths) if residual_path else paths


def token_form(head: Symbol | None = None) -> Any:
    """The block of one head in tokens and weights only: no key or value bias is left."""
    product = mul(W_O(head), W_V(head))
    row = mul(transpose(add(mul(W_Q(head), x(i)), b_Q(head))), W_K(head))
    return add(
        mul(a(i, j, head=head), product),
        mul(c, a(i, j, head=head), product, sub(x(j), xbar(i, head)), row),
        mul(D_IJ, c, product, token_cov(i, head), transpose(W_K(head)), W_Q(head)),
    )


@cache
def biases() -> Derivation:
    """With biases written out: only the query bias is left in the Jacobian."""
    build = Builder()
    build.start("deviation of values", sub(v(j), vbar(i)))
    written = add(mul(W_V(), x(j)), b_V())
    mean = total(mul(a(i, l), add(mul(W_V(), x(l)), b_V())), l)
    build.eq(sub(written, mean), rules.DEFINITION)
    build.eq(mul(W_V(), sub(x(j), xbar(i))), rules.ROWS)
    build.start("deviation of keys", sub(key(j), kbar(i)))
    key_mean = total(mul(a(i, l), add(mul(W_K(), x(l)), b_K())), l)
    build.eq(sub(add(mul(W_K(), x(j)), b_K()), key_mean), rules.DEFINITION)
    build.eq(mul(W_K(), sub(x(j), xbar(i))), rules.ROWS)
    build.start("covariance", cov(i))
    deviations = mul(a(i, l), sub(v(l), vbar(i)), transpose(sub(key(l), kbar(i))))
    build.eq(total(deviations, l), rules.DEFINITION)
    tokens = sub(x(l), xbar(i))
    spread = mul(a(i, l), W_V(), tokens, transpose(mul(W_K(), tokens)))
    build.eq(total(spread, l), rules.CITE, "deviation of values", "deviation of keys")
    build.eq(mul(W_V(), total(mul(a(i, l), tokens, transpose(tokens)), l), transpose(W_K())), rules.LINEAR)
    build.eq(mul(W_V(), token_cov(i), transpose(W_K())), rules.DEFINITION)
    build.start("token form", Partial(out(i), x(j)))
    build.eq(add(mul(D_IJ, eye), value_block(), key_block(), query_block()), rules.CITE, one_head().result())
    build.eq(add(mul(D_IJ, eye), token_form()), rules.CITE, "deviation of values", "covariance")
    return build.done(
        "biases",
        "With the biases written out",
        "Value bias and key bias cancel in the deviations from the row's mean, and the output bias has no "
        "derivative. The "
        "query bias alone is left: it adds a constant to the direction along which keys are compared. (The key "
        "bias drops "
        "out of the weights too: a number added to all scores of a row.)",
        results=("deviation of values", "deviation of keys", "covariance", "token form"),
    )


@cache
def common_shift() -> Derivation:
    """The row sum of the blocks: the derivative along a common shift of all tokens."""
    build = Builder()
    build.start("key path over a row", total(key_block(), j))
    deviation = total(mul(a(i, j), sub(v(j), vbar(i))), j)
    build.eq(mul(c, W_O(), deviation, gain()), rules.LINEAR)
    build.eq(ZeroMatrix(D, D), rules.ROWS)
    build.start("common shift", total(Partial(out(i), x(j)), j))
    build.eq(total(whole(), j), rules.CITE, heads().result("heads"))
    value_row = total(total(value_block(h), j), h)
    key_row = total(total(key_block(h), j), h)
    query_row = total(query_core(h), h)
    build.eq(add(eye, value_row, key_row, query_row), rules.SIFT)
    build.eq(add(eye, total(mul(W_O(h), W_V(h)), h), query_row), rules.ROWS, "key path over a row")
    return build.done(
        "common-shift",
        "A common shift of all tokens",
        "Moving all tokens by the same step sums the blocks of a row. The key path sums to exactly zero: all "
        "scores of the "
        "row move by the same amount, which the softmax does not see. Value path and query path remain.",
        results=("key path over a row",),
    )


def derivations() -> tuple[Derivation, ...]:
    """The derivations of the plain layer."""
    return (
        scores(),
        residual(),
        value_path(),
        key_path(),
        query_path(),
        weight_path(),
        one_head(),
        heads(),
        biases(),
        common_shift(),
    )
