"""Every symbol of the derivations, once, with its assumptions.

Times: ``i`` is the query (output) time, ``j`` the key (input) time, ``k l m n`` run over times; ``h`` and ``g`` are
heads. A headed quantity is written without a head index where a derivation looks at one head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sympy import Basic, Identity, Symbol

from theory.expressions import HEADS, TIMES, Block, Entry

h, g = HEADS
i, j, k, l, m, n = TIMES  # noqa: E741 - the field's indices

T = Symbol("T", integer=True, positive=True)
D = Symbol("D", integer=True, positive=True)
d = Symbol("d", integer=True, positive=True)
H = Symbol("H", integer=True, positive=True)
c = Symbol("c", positive=True)
R = Symbol("R", positive=True)
beta = Symbol("beta", real=True)
gamma = Symbol("gamma", real=True)
t = Symbol("t", real=True)
p = Symbol("p", positive=True)
eye = Identity(D)

#: name -> (LaTeX, whether it belongs to a head, how many time indices it has)
NAMES: dict[str, tuple[str, bool, int]] = {
    "x": ("x", False, 1),
    "h": ("h", False, 1),
    "u": ("u", False, 1),
    "z": ("z", False, 1),
    "uhat": (r"\hat u", False, 1),
    "q": ("q", True, 1),
    "k": ("k", True, 1),
    "v": ("v", True, 1),
    "o": ("o", True, 1),
    "vbar": (r"\bar v", True, 1),
    "kbar": (r"\bar k", True, 1),
    "xbar": (r"\bar x", True, 1),
    "vrest": (r"\bar v^{\setminus}", True, 1),
    "krest": (r"\bar k^{\setminus}", True, 1),
    "Cov": (r"\mathrm{Cov}", True, 1),
    "Crest": (r"\mathrm{Cov}^{\setminus}", True, 1),
    "X": ("X", True, 1),
    "W_Q": ("W_Q", True, 0),
    "W_K": ("W_K", True, 0),
    "W_V": ("W_V", True, 0),
    "W_O": ("W_O", True, 0),
    "b_Q": ("b_Q", True, 0),
    "b_K": ("b_K", True, 0),
    "b_V": ("b_V", True, 0),
    "b_O": ("b_O", False, 0),
    "Rot": (r"\Theta", False, 1),
    "Gamma": (r"\Gamma", False, 0),
    "one": (r"\mathbf 1", False, 0),
    "L": (r"L", False, 1),
    "a": ("a", True, 2),
    "b": (r"a^{\setminus}", True, 2),
    "s": ("s", True, 2),
    "B": ("B", True, 2),
    "m": ("m", True, 2),
    "gap": (r"\Delta", True, 3),
    "sigma": (r"\sigma", False, 1),
    "w_max": (r"w_{\max}", True, 0),
}


def _vector(name: str, rows: Symbol) -> Callable[..., Block]:
    def build(time: Any, head: Symbol | None = None) -> Block:
        return Block(name, rows, 1, *([] if head is None else [head]), time)

    return build


def _number(name: str) -> Callable[..., Entry]:
    def build(*times: Any, head: Symbol | None = None) -> Entry:
        return Entry(name, *([] if head is None else [head]), *times)

    return build


def _weight(name: str, rows: Symbol, columns: Any) -> Callable[..., Block]:
    def build(head: Symbol | None = None) -> Block:
        return Block(name, rows, columns, *([] if head is None else [head]))

    return build


x, out, u, z, uhat = (_vector(name, D) for name in ("x", "h", "u", "z", "uhat"))
q, key, v, o = (_vector(name, d) for name in ("q", "k", "v", "o"))
vbar, kbar, vrest, krest = (_vector(name, d) for name in ("vbar", "kbar", "vrest", "krest"))
xbar = _vector("xbar", D)
W_Q, W_K, W_V = (_weight(name, d, D) for name in ("W_Q", "W_K", "W_V"))
W_O = _weight("W_O", D, d)
b_Q, b_K, b_V = (_weight(name, d, 1) for name in ("b_Q", "b_K", "b_V"))  # noqa: N816 - the field's names
b_O = _weight("b_O", D, 1)  # noqa: N816
a, b, s, B, mult, gap, sigma = (_number(name) for name in ("a", "b", "s", "B", "m", "gap", "sigma"))
Gamma = Block("Gamma", D, D)
one = Block("one", D, 1)


def cov(time: Any, head: Symbol | None = None) -> Block:
    """``Cov_i``: the covariance of values and keys under the weights of row i, ``(d, d)``."""
    return Block("Cov", d, d, *([] if head is None else [head]), time)


def cov_rest(time: Any, head: Symbol | None = None) -> Block:
    """The same covariance under the weights of the masked row, which leaves token i out, ``(d, d)``."""
    return Block("Crest", d, d, *([] if head is None else [head]), time)


def token_cov(time: Any, head: Symbol | None = None) -> Block:
    """``X_i``: the covariance of the tokens under the weights of row i, ``(D, D)``."""
    return Block("X", D, D, *([] if head is None else [head]), time)


def norm_jacobian(time: Any) -> Block:
    """``L_i``: the Jacobian of the layer normalisation at time i, ``(D, D)``."""
    return Block("L", D, D, time)


def rotation(time: Any) -> Block:
    """``Theta_i``: the rotation of queries and keys at time i, ``(d, d)``."""
    return Block("Rot", d, d, time)


def with_head(expression: Basic, head: Symbol = h) -> Basic:
    """The same formula for head ``head``: every headed leaf without a head index gets one."""
    leaves = {
        leaf: leaf.func(*leaf.args[: len(leaf.args) - len(leaf.indices)], head, *leaf.indices)
        for leaf in expression.atoms(Block, Entry)
        if NAMES[leaf.name][1] and len(leaf.indices) == NAMES[leaf.name][2]
    }
    return expression.xreplace(leaves)
