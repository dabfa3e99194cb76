"""Other variants: causal, without the residual, rotary positions, and layer normalisation after or before."""

from __future__ import annotations

from functools import cache
from typing import Any

from sympy import Gt, ZeroMatrix

from theory import attention, rules, softmax
from theory.attention import D_IJ
from theory.derivation import Builder, Derivation
from theory.expressions import Partial, add, delta, mul, sub, total, transpose
from theory.layer import Layer
from theory.symbols import (
    W_K,
    W_O,
    W_Q,
    W_V,
    D,
    Gamma,
    a,
    b_O,
    c,
    cov,
    eye,
    gamma,
    h,
    i,
    j,
    key,
    l,
    m,
    norm_jacobian,
    one,
    out,
    q,
    rotation,
    s,
    sigma,
    u,
    uhat,
    v,
    vbar,
    x,
    z,
)


@cache
def causal() -> Derivation:
    """A causal mask: zeros above the diagonal, and a first row without weight path."""
    build = Builder()
    heads = attention.heads()
    build.start("hidden weight", a(i, j), where=[Gt(j, i)]).eq(mul(0, a(i, j)), rules.DEFINITION)
    build.start("later keys", Partial(out(i), x(j)), where=[Gt(j, i)])
    paths = total(add(attention.value_block(h), attention.key_block(h)), h)
    build.eq(paths, rules.CITE, heads.result("off the diagonal"))
    build.eq(ZeroMatrix(D, D), rules.CASES, "hidden weight")
    build.start("first row", Partial(out(1), x(1)))
    first = add(eye, total(attention.diagonal_block(h, 1), h))
    build.eq(first, rules.CITE, heads.result("on the diagonal"))
    build.eq(add(eye, total(mul(W_O(h), W_V(h)), h)), rules.CASES)
    build.start("any row", Partial(out(i), x(j))).eq(attention.whole(), rules.CITE, heads.result("heads"))
    return build.done(
        "causal",
        "Causal attention",
        "Hidden keys have weight zero, so every block above the diagonal is exactly zero. The first row sees one "
        "key, whose "
        "weight is 1: both weight paths vanish and $J_{11}=I+\\sum_h W_OW_V$. All other rows follow the same formulas.",
        layer=Layer(hidden="causal"),
        results=("later keys", "first row"),
    )


@cache
def no_residual() -> Derivation:
    """Without the residual: the same three paths."""
    build = Builder().start("no residual", Partial(out(i), x(j)))
    sent = total(total(mul(a(i, l, head=h), W_O(h), v(l, h)), l), h)
    build.eq(Partial(add(sent, b_O()), x(j)), rules.DEFINITION)
    build.eq(total(add(attention.value_start(h), attention.weight_start(h)), h), rules.PRODUCT)
    results = attention.value_path().result(), attention.weight_path().result()
    build.eq(attention.whole(residual_path=False), rules.CITE, *results)
    return build.done(
        "no-residual",
        "Without the residual",
        "Leaving the residual out takes the identity off the diagonal and changes nothing else. As "
        "$\\lVert I\\rVert_F=\\sqrt D$, a raw diagonal mostly measures the residual: compare with it left out.",
        layer=Layer(residual=False),
    )


@cache
def gate() -> Derivation:
    """A gate on the residual: the residual path times gamma, the same three others."""
    build = Builder().start("gated residual", Partial(out(i), x(j)))
    sent = total(total(mul(a(i, l, head=h), W_O(h), v(l, h)), l), h)
    build.eq(Partial(add(mul(gamma, x(i)), sent, b_O()), x(j)), rules.DEFINITION)
    paths = total(add(attention.value_start(h), attention.weight_start(h)), h)
    build.eq(add(mul(gamma, Partial(x(i), x(j))), paths), rules.PRODUCT)
    results = attention.residual().result(), attention.value_path().result(), attention.weight_path().result()
    build.eq(add(mul(gamma, D_IJ, eye), attention.whole(residual_path=False)), rules.CITE, *results)
    return build.done(
        "gate",
        "A gate on the residual",
        "With $h_i=\\gamma x_i+o_i$ the residual path is $\\gamma I$, of Frobenius norm $|\\gamma|\\sqrt D$; nothing "
        "else changes. $\\gamma=1$ is the plain residual and $\\gamma=0$ none. It is the one knob that reaches the "
        "largest part of a raw diagonal, which no mask, penalty or dropout of logits touches.",
        layer=Layer(gated=True),
    )


@cache
def rotary() -> Derivation:
    """Rotary positions: queries and keys are rotated by their times before they are compared."""
    build = Builder()
    build.start("score", Partial(s(i, m), x(j)))
    turned_q, turned_k = mul(rotation(i), q(i)), mul(rotation(m), key(m))
    in_key = mul(transpose(turned_q), rotation(m), Partial(key(m), x(j)))
    in_query = mul(transpose(turned_k), rotation(i), Partial(q(i), x(j)))
    build.eq(mul(c, add(in_key, in_query)), rules.PRODUCT)
    key_row = mul(delta(m, j), transpose(turned_q), rotation(m), W_K())
    query_row = mul(D_IJ, transpose(turned_k), rotation(i), W_Q())
    scores = attention.scores()
    build.eq(mul(c, add(key_row, query_row)), rules.CITE, scores.result("key"), scores.result("query"))
    build.start("weight", Partial(a(i, l), x(j)))
    softened = mul(a(i, l), delta(l, m) - a(i, m))
    build.eq(total(mul(softened, Partial(s(i, m), x(j))), m), rules.CHAIN, softmax.derivative().result("derivative"))
    build.eq(total(mul(softened, c, add(key_row, query_row)), m), rules.CITE, "score")
    build.start("block", Partial(out(i), x(j)))
    paths = add(Partial(x(i), x(j)), attention.value_start(), attention.weight_start())
    build.eq(paths, rules.PRODUCT)
    inside = total(mul(W_O(), v(l), total(mul(softened, c, add(key_row, query_row)), m)), l)
    results = attention.residual().result(), attention.value_path().result()
    build.eq(add(mul(D_IJ, eye), attention.value_block(), inside), rules.CITE, "weight", *results)
    gain = transpose(mul(transpose(W_K()), transpose(rotation(j)), rotation(i), q(i)))
    key_path = mul(c, a(i, j), W_O(), sub(v(j), vbar(i)), gain)
    query_path = mul(D_IJ, c, W_O(), cov(i), rotation(i), W_Q())
    build.eq(add(mul(D_IJ, eye), attention.value_block(), key_path, query_path), rules.SIFT)
    return build.done(
        "rotary",
        "Rotary positions",
        "The score compares $\\Theta_iq_i$ with $\\Theta_mk_m$. The direction of the key path then depends on j, "
        "so its row "
        "sum is no longer zero. In $\\mathrm{Cov}_i$ the keys are the rotated ones.",
        layer=Layer(rotary=True),
        results=("score", "block"),
    )


@cache
def layer_norm() -> Derivation:
    """The Jacobian of layer normalisation."""
    build = Builder()
    centring = add(eye, mul(-1 / D, one, transpose(one)))
    build.start("deviation", Partial(sigma(i), u(i)))
    build.eq(mul(1 / (2 * sigma(i)), Partial(sigma(i) ** 2, u(i))), rules.CHAIN_SQUARE)
    build.eq(mul(1 / D, transpose(uhat(i))), rules.COLLECT)
    build.start("unit vector", Partial(uhat(i), u(i)))
    build.eq(add(mul(1 / sigma(i), centring), mul(-1 / sigma(i), uhat(i), Partial(sigma(i), u(i)))), rules.QUOTIENT)
    projected = add(eye, mul(-1 / D, one, transpose(one)), mul(-1 / D, uhat(i), transpose(uhat(i))))
    build.eq(mul(1 / sigma(i), projected), rules.CITE, "deviation")
    build.start("definition", norm_jacobian(i)).eq(Partial(out(i), u(i)), rules.DEFINITION)
    build.eq(mul(Gamma, Partial(uhat(i), u(i))), rules.LINEAR)
    build.eq(mul(1 / sigma(i), Gamma, projected), rules.CITE, "unit vector")
    build.start("common mode", mul(norm_jacobian(i), one))
    build.eq(mul(1 / sigma(i), Gamma, projected, one), rules.CITE, "definition")
    build.eq(ZeroMatrix(D, 1), rules.COLLECT)
    return build.done(
        "layer-norm",
        "Layer normalisation",
        "With $\\hat u_i = (u_i - \\mathrm{mean})/\\sigma_i$, $\\sigma_i^2 = \\mathrm{var} + \\varepsilon$ and "
        "$h_i=\\Gamma\\hat u_i + b$: the derivative removes the mean and the component along $\\hat u_i$ (up to "
        "$\\varepsilon$), and divides by the standard deviation. A shift of all features by the same number is lost.",
        layer=Layer(norm="post"),
        results=("definition", "common mode"),
    )


@cache
def post_norm() -> Derivation:
    """Normalisation after the residual sum: ``L_i J_ij``."""
    build = Builder().start("post-norm", Partial(out(i), x(j)))
    build.eq(mul(Partial(out(i), u(i)), Partial(u(i), x(j))), rules.CHAIN_TOKEN)
    build.eq(mul(norm_jacobian(i), Partial(u(i), x(j))), rules.CITE, layer_norm().result("definition"))
    build.eq(mul(norm_jacobian(i), attention.whole()), rules.CITE, _sum_before_norm())
    return build.done(
        "post-norm",
        "Post-norm",
        "With $h_i = \\mathrm{LN}(x_i + o_i)$ every block is multiplied from the left by the normalisation's "
        "Jacobian at the "
        "query time. The residual block is then $L_i$, no longer the identity.",
        layer=Layer(norm="post"),
    )


def _sum_before_norm() -> Any:
    """The result for several heads, read for ``u_i = x_i + o_i``."""
    from theory.matching import Equation

    result = attention.heads().result("heads")
    return Equation("heads", Partial(u(i), x(j)), "=", result.rhs)


@cache
def pre_norm() -> Derivation:
    """Normalisation before attention: ``delta_ij I + J_ij L_j``."""
    build = Builder().start("pre-norm", Partial(out(i), x(j)))
    inner = attention.whole(residual_path=False)
    build.eq(add(mul(D_IJ, eye), mul(inner, Partial(z(j), x(j)))), rules.CHAIN_TOKEN, no_residual().result())
    build.eq(add(mul(D_IJ, eye), mul(inner, norm_jacobian(j))), rules.DEFINITION)
    return build.done(
        "pre-norm",
        "Pre-norm",
        "With $h_i = x_i + o_i(z)$, $z_j=\\mathrm{LN}(x_j)$, the attention blocks are multiplied from the right by the "
        "normalisation's Jacobian at the key time, and the residual stays the identity. Queries, keys and values "
        "are those "
        "of the normalised tokens.",
        layer=Layer(norm="pre"),
    )


def derivations() -> tuple[Derivation, ...]:
    """The derivations of the other variants."""
    return causal(), no_residual(), gate(), rotary(), layer_norm(), post_norm(), pre_norm()
