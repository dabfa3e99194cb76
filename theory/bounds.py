r"""The bounds: what each says, what it assumes, where it comes from, and why it holds.

>>> from theory.bounds import BOUNDS
>>> BOUNDS["worst_case"].evaluate(T=9, R=0, heads={"mu": [2.0], "omega": [1.0], "rho": [0.0]})
0.222...

``N`` is the spectral norm unless a bound says otherwise; ``\lVert\cdot\rVert`` is the Euclidean or spectral norm. Every
quantity of a head carries its index h. ``sensitivity.bounds.check`` evaluates them on layers, with masks and biases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Expr, IndexedBase, Min, Rational, Sum, Symbol, binomial, exp, latex, sqrt

from theory.symbols import H, R, T

h = Symbol("h", integer=True, positive=True)
k = Symbol("k", integer=True)
n = Symbol("n", integer=True, positive=True)
L = Symbol("L", integer=True, positive=True)
K = Symbol("K", integer=True, positive=True)
lag = Symbol("tau", integer=True, nonnegative=True)
delta = Symbol("delta", nonnegative=True)
query = Symbol("C", nonnegative=True)
inner = Symbol("C_V", nonnegative=True)
weakest = Symbol(r"\sigma_{\min}", nonnegative=True)
along = Symbol(r"\gamma", nonnegative=True)
gain = Symbol("lambda", nonnegative=True)
a, alpha, beta, mu, nu, omega, psi, rho, kappa, eta, upsilon = (
    IndexedBase(name, nonnegative=True)
    for name in ("a", "alpha", "beta", "mu", "nu", "omega", "psi", "rho", "kappa", "eta", "upsilon")
)
first, second, paths = IndexedBase("N^{(1)}"), IndexedBase("N^{(2)}"), IndexedBase("A")
i, j = Symbol("i", integer=True, positive=True), Symbol("j", integer=True, positive=True)

#: What the symbols mean.
MEANING = {
    "a_h": "attention weight of head h on this pair",
    "mu_h": "norm of the value map, $N(M_h)$ with $M_h=W_O^hW_V^h$",
    "nu_k": "norm of the sum of the k value maps with the largest weights",
    "beta_k": r"the heads' weights in descending order, $\beta_{H+1}=0$",
    "gamma": r"norm of $G=\sum_h a_h(M_hQ+(u_h-\bar u_h)z_h^\top)$, the block on the span $Q$ of the $w_h$",
    "omega_h": r"length of the score gradient $w_h=c\,W_K^{h\top}q^h$ (its maximum, in a bound for a whole ball)",
    "eta_h": r"$\lVert M_h w_h\rVert/\lVert w_h\rVert$",
    "upsilon_h": r"distance of $W_O^hv_j^h$ from its weighted mean, $\lVert W_O^h(v_j^h-\bar v_i^h)\rVert$",
    "rho_h": "largest distance of a mapped token $M_hx_l$ from a common centre",
    "kappa_h": r"$\max_{\lVert x\rVert=1}\lVert M_hx\rVert\,\lVert c\,W_Q^{h\top}W_K^hx\rVert$",
    "delta": "1 with the residual (the norm of the identity), 0 without",
    "C": r"bound of the query paths, at most $\sum_hR^2\kappa_h$",
    "C_V": "bound of all paths but the residual, before the output weights",
    "sigma_min": "smallest singular value of the output weights of all heads side by side",
    "n": "number of other keys that a row sees; $T-1$ without a mask",
}


#: The largest weight that a key can have when no two scores of the row differ by more than ``2 R omega``.
LARGEST_WEIGHT = 1 / (1 + (T - 1) * exp(-2 * R * omega[h]))
_LOW = Min(alpha[h], Rational(1, 2))
#: Symbols that abbreviate others, in the order in which they are put in: alpha, and the largest ``a (1 - a)`` up to it.
DEFINITIONS: dict[Expr, Expr] = {psi[h]: _LOW * (1 - _LOW), alpha[h]: LARGEST_WEIGHT}


def _heads(term: Expr) -> Expr:
    return Sum(term, (h, 1, H))


@dataclass(frozen=True)
class Bound:
    """One proved limit.

    Attributes:
        name: what it is called everywhere.
        quantity: what it limits, in LaTeX.
        expression: the limit, in the symbols of ``MEANING``.
        assumptions: what must hold.
        reference: where it, or its like, stands in the literature.
        proof: why it holds, in a few sentences.
        kind: ``upper`` or ``lower``.
    """

    name: str
    quantity: str
    expression: Expr
    assumptions: tuple[str, ...]
    reference: str
    proof: str
    kind: str = "upper"

    def latex(self) -> str:
        """The inequality as one LaTeX formula."""
        relation = r"\le" if self.kind == "upper" else r"\ge"
        used = [symbol for symbol in reversed(DEFINITIONS) if self.expression.has(symbol)]
        where = "".join(rf",\quad {latex(symbol)} = {latex(DEFINITIONS[symbol])}" for symbol in used)
        return f"{self.quantity} {relation} {latex(self.expression)}{where}"

    def full(self) -> Expr:
        """The limit with abbreviations written out."""
        found = self.expression
        for symbol, meaning in DEFINITIONS.items():
            found = found.xreplace({symbol: meaning})
        return found

    def evaluate(self, heads: Mapping[str, Sequence[float]] | None = None, **values: float) -> float:
        """The limit as a number.

        Args:
            heads: per-head quantities by symbol, one value per head (or per rank, for ``beta`` and ``nu``).
            **values: the other symbols by name.

        Raises:
            ValueError: a symbol has got no value; the message names it.
        """
        per_head = dict(heads or {})
        count = max((len(row) for row in per_head.values()), default=1)
        found = self.full().subs(H, count)
        found = found.subs(
            {symbol: values[symbol.name] for symbol in found.free_symbols if symbol.name in values}
        ).doit()
        places = {
            entry: [*per_head[name], 0.0][int(entry.indices[0]) - 1]
            for entry in found.atoms(sympy.Indexed)
            if (name := str(entry.base.label)) in per_head
        }
        found = found.xreplace({entry: sympy.Float(value) for entry, value in places.items()})
        missing = sorted(str(symbol) for symbol in found.free_symbols)
        if missing:
            raise ValueError(f"the bound {self.name!r} needs a value for {', '.join(missing)}")
        return float(found)


_BALL = r"all tokens in a ball of radius $R$"
_ROWS = "weights of a row sum to one (no dropout after the softmax)"
_PAPER = "arXiv:2602.10956 states the rate for uniform attention"

_LOCAL = Bound(
    name="local",
    quantity=r"N(J_{ij})",
    expression=sqrt(Sum((beta[k] - beta[k + 1]) * nu[k], (k, 1, H)) ** 2 + along**2),
    assumptions=(),
    reference="",
    proof=(
        r"Split the input space along the span $Q$ of the row's score gradients: $J_{ij}=B(I-QQ^\top)+GQ^\top$ "
        r"with $B=\sum_ha_hM_h$. The parts act on orthogonal inputs, so "
        r"$J_{ij}J_{ij}^\top=B(I-QQ^\top)B^\top+GG^\top$ and squared norms add; this holds for Frobenius norms "
        "too. For $N(B)$ sort the heads by weight and sum by parts: $B$ is a combination, with coefficients "
        r"$\beta_k-\beta_{k+1}\ge0$, of sums of the first $k$ value maps. Only $G$, with one column per head, is "
        "computed for each pair. On the diagonal the norm of the residual and query paths is added."
    ),
)
_TRIANGLE = Bound(
    name="triangle",
    quantity=r"N(J_{ij})",
    expression=_heads(a[h] * (mu[h] + upsilon[h] * omega[h])),
    assumptions=(),
    reference="arXiv:2602.10956",
    proof=r"Triangle inequality over heads and paths, and $\lVert uw^\top\rVert=\lVert u\rVert\lVert w\rVert$.",
)
_EXPECTED = Bound(
    name="expected",
    quantity=r"\frac1n\sum_{j\ne i}N(J_{ij})",
    expression=_heads(sqrt(mu[h] ** 2 + eta[h] ** 2 + omega[h] ** 2 * rho[h] ** 2)) / n,
    assumptions=(_ROWS, "for the reading as $E\\,N(J_{ij})$: exchangeable tokens, no bias that tells keys apart"),
    reference=_PAPER,
    proof=(
        r"By the split of the local bound, one head gives $a_j\sqrt{N(M)^2+\lVert M\hat w+\lVert w\rVert(u_j-\bar "
        r"u)\rVert^2}$. Weights of a row sum to one and the root is concave (Jensen), so the sum over j is at most "
        r"the root of the weighted mean; its cross term vanishes because $\sum_ja_j(u_j-\bar u)=0$, and "
        r"$\sum_ja_j\lVert u_j-\bar u\rVert^2\le\rho^2$ for any centre. Heads add by the triangle inequality, "
        "which heads that attend to different keys attain. The mean over the keys of a row is what exchangeable "
        r"tokens make of every single pair: no uniform attention is needed. For Frobenius norms $\eta_h$ drops "
        r"out; and $\mu_h+\omega_h\rho_h$ is used where it is smaller."
    ),
)
_EXPECTED_BALL = Bound(
    name="expected_ball",
    quantity=r"\frac1n\sum_{j\ne i}N(J_{ij})",
    expression=_heads(Min(mu[h] + omega[h] * rho[h], sqrt(2 * mu[h] ** 2 + omega[h] ** 2 * rho[h] ** 2))) / n,
    assumptions=(
        _ROWS,
        _BALL,
        "for the reading as $E\\,N(J_{ij})$: exchangeable tokens, no bias that tells keys apart",
    ),
    reference=_PAPER,
    proof=(
        r"The expected bound with $\rho_h=\lVert M_h\rVert R$, $\eta_h\le\mu_h$ and the largest score gradient in "
        "the ball."
    ),
)
_WORST = Bound(
    name="worst_case",
    quantity=r"N(J_{ij})",
    expression=_heads(alpha[h] * mu[h] + 2 * psi[h] * rho[h] * omega[h]),
    assumptions=(_ROWS, _BALL),
    reference="",
    proof=(
        r"Scores of one row differ by at most $2R\omega_h$, which bounds the largest weight by "
        r"$\alpha=1/(1+(T-1)e^{-2R\omega})$. A token is $(1-a)$ times its distance from the mean of the others "
        r"away from its weighted mean, at most $(1-a)\,2\rho$; and $a(1-a)\le\alpha(1-\alpha)$ up to "
        r"$\alpha=\frac12$, $\frac14$ beyond. With masks and biases, $1/T$ becomes the softmax of the biases alone."
    ),
)
_DIAGONAL = Bound(
    name="diagonal",
    quantity=r"N(J_{ii})",
    expression=delta + query + _heads(a[h] * mu[h] + 2 * a[h] * (1 - a[h]) * rho[h] * omega[h]),
    assumptions=(_ROWS,),
    reference="",
    proof=(
        "Residual, query path, and the value and key paths of the token's own weight. The query path of a head is "
        r"$M_h\Sigma N_h=\sum_la_lM_h\tilde x_l(N_h^\top\tilde x_l)^\top$, so for every $t>0$ its norm is at most "
        r"$\frac12\max_l(t\lVert M_h(x_l-c)\rVert^2+\lVert N_h^\top(x_l-c)\rVert^2/t)$ around any centre c. Heads "
        "add, or act between the stacked output and query weights on coordinates of their own; the smaller of the "
        "two is $C$."
    ),
)
_DIAGONAL_BALL = Bound(
    name="diagonal_ball",
    quantity=r"N(J_{ii})",
    expression=delta + query + _heads(alpha[h] * mu[h] + 2 * psi[h] * rho[h] * omega[h]),
    assumptions=(_ROWS, _BALL),
    reference="",
    proof=(
        r"As the diagonal bound, with $C\le\sum_hR^2\kappa_h$. For one head $\kappa$ is sharp: with the weights on "
        r"two antipodal tokens $\pm Rx$ the covariance is $R^2xx^\top$ and the query path has the norm $R^2\lVert "
        r"Mx\rVert\lVert N^\top x\rVert$. By convexity of the joint range of two quadratic forms "
        r"$\kappa=\min_t\frac12\lambda_{\max}(tM^\top M+NN^\top/t)$. No term grows with T: the diagonal is O(1)."
    ),
)
_DIAGONAL_LOWER = Bound(
    name="diagonal_lower",
    quantity=r"\lVert J_{ii}\rVert",
    expression=1 - weakest * inner,
    assumptions=(
        _ROWS,
        "a residual connection",
        r"$\sigma_{\min}C_V<1$: attention cannot reach every output direction",
    ),
    reference="",
    proof=(
        r"All paths but the residual end in the output weights: $J_{ii}=I+W_OY$ with $\lVert Y\rVert\le C_V$. For "
        r"the left singular vector y of $W_O$ with singular value $\sigma$, $\lVert y^\top J_{ii}\rVert\ge1-\sigma "
        "C_V$. The norm is at least the largest of these; the Frobenius norm, the root of the sum of their "
        r"squares. $C_V$ is bounded in T like the diagonal bound, so the diagonal is $\Theta(1)$ wherever this "
        "applies."
    ),
    kind="lower",
)
_LIPSCHITZ = Bound(
    name="lipschitz",
    quantity=r"\lVert J\rVert",
    expression=delta + query + sqrt(T) * _heads(mu[h] + rho[h] * omega[h]),
    assumptions=(_ROWS, _BALL),
    reference="order sqrt(T) as in Castin, Ablin, Peyre 2024 (arXiv:2312.14820); Kim, Papamakarios, Mnih 2021",
    proof=(
        "Residual and query paths form a block-diagonal matrix. The value and key paths of a head send $(y_j)$ to "
        r"$\sum_ja_{ij}(My_j+(u_j-\bar u_i)\,w\cdot y_j)$, at most $(\lVert M\rVert+\omega\rho)(\sum_ja_{ij}\lVert "
        r"y_j\rVert^2)^{1/2}$ by Cauchy-Schwarz; summed over i, a column of the weights is at most T, which is "
        "reached when all rows attend to one key."
    ),
)
_STACK = Bound(
    name="stack",
    quantity=r"N(J^{(2)\circ(1)}_{ij})",
    expression=Sum(second[i, k] * first[k, j], (k, 1, T)),
    assumptions=("norm maps of every layer at the tokens that reach it",),
    reference="",
    proof=(
        "Chain rule, triangle inequality and submultiplicativity; further layers multiply on. All factors but one "
        "may be spectral when the end-to-end norm is Frobenius. With normalisations in between, their Jacobians "
        "are factors too."
    ),
)
_CAUSAL = Bound(
    name="causal_paths",
    quantity=r"\lVert J^{(L)}_{ij}\rVert",
    expression=Sum(binomial(L, k) * gain**k * paths[k, i, j], (k, 0, L)),
    assumptions=(
        r"L layers with residual and the same lower-triangular weights, $A_k$ being their k-th power",
        r"every block beside the residual at most $\lambda a_{ij}$",
    ),
    reference="Barbero et al. 2024 (arXiv:2406.04267), sums over paths in decoder-only models",
    proof=(
        r"The stack bound with $N=I+\lambda A$: the binomial theorem counts how many of the L residuals a path "
        "skips. Powers of a row-stochastic lower-triangular matrix drift to the first column, so early tokens "
        "collect more paths."
    ),
)
_CONVOLUTION = Bound(
    name="convolution",
    quantity=r"\lVert J^{(L)}_{i,i-\tau}\rVert",
    expression=gain**L
    * Sum((-1) ** k * binomial(L, k) * binomial(L + lag - K * k - 1, L - 1), (k, 0, sympy.floor(lag / K))),
    assumptions=(
        r"L causal temporal convolutions of kernel size K, taps at most $\lambda$, activations with slope at most 1",
    ),
    reference="Marisca, Bamberger, Alippi, Bronstein 2025 (arXiv:2506.15507), primacy of causal convolutions",
    proof=(
        r"The stack bound: each layer moves a signal by 0 to K-1 steps, so the number of paths of lag $\tau$ is "
        r"the coefficient of $z^\tau$ in $(1+z+\dots+z^{K-1})^L$, by inclusion and exclusion the sum above. Within "
        "the receptive field it grows with the lag before it falls: old inputs have more paths than new ones."
    ),
)

#: The bounds by name.
BOUNDS: dict[str, Bound] = {
    bound.name: bound
    for bound in (
        _LOCAL,
        _TRIANGLE,
        _EXPECTED,
        _EXPECTED_BALL,
        _WORST,
        _DIAGONAL,
        _DIAGONAL_BALL,
        _DIAGONAL_LOWER,
        _LIPSCHITZ,
        _STACK,
        _CAUSAL,
        _CONVOLUTION,
    )
}


def describe(name: str) -> dict[str, Any]:
    """A bound as plain text, for tables and pages."""
    bound = BOUNDS[name]
    return {"name": bound.name, "formula": bound.latex(), "assumptions": list(bound.assumptions), "proof": bound.proof}
