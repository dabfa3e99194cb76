"""The layers on which derivations are checked: small exact ones, and many extreme ones in doubles."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

from sympy import QQ

from theory.arithmetic import Rows, each
from theory.instance import FloatInstance, Instance, RationalInstance
from theory.layer import Layer, Parameters, Sizes
from theory.symbolic import SymbolicInstance

_ROTATIONS = [(1, 0, 1), (3, 4, 5), (5, 12, 13), (-4, 3, 5), (-12, 5, 13), (8, 15, 17)]


def draw(layer: Layer, sizes: Sizes, seed: int) -> Parameters:
    """Random rational parameters, small enough to read."""
    source = random.Random(f"{seed} {sizes}")

    def number(low: int = -5) -> Any:
        return QQ(source.choice([n for n in range(low, 6) if n]), source.choice((1, 2, 3)))

    def matrix(rows: int, columns: int, low: int = -5) -> Rows:
        return [[number(low) for _ in range(columns)] for _ in range(rows)]

    s = sizes
    shapes = {f"{kind}_{name}": (s.d, s.D if kind == "W" else 1) for kind in "Wb" for name in "QKV"} | {
        "W_O": (s.D, s.d)
    }
    heads = [{name: matrix(*shape) for name, shape in shapes.items()} for _ in range(s.H)]
    square = [matrix(s.T, s.T) for _ in range(s.H)]
    e = [matrix(s.T, s.T, 1) for _ in range(s.H)]
    if layer.uniform:
        e = [[[QQ(1)] * s.T for _ in range(s.T)] for _ in range(s.H)]
    scalars = {name: number(1) for name in ("c", "epsilon", "exp_beta", "exp_t", "beta", "t")}
    return Parameters(
        x=matrix(s.T, s.D),
        heads=heads,
        b_O=matrix(s.D, 1),
        B=[each(lambda _: QQ(0), rows) for rows in square] if layer.exchangeable else square,
        m=[matrix(s.T, s.T, 1) for _ in range(s.H)],
        e=e,
        rotations=[_rotation(s.d, index) for index in range(s.T)],
        gamma=[number() for _ in range(s.D)],
        shift=[number() for _ in range(s.D)],
        sigma=[number(1) for _ in range(s.T)],
        scalars=scalars | {"p": QQ(1, 3), "R": QQ(7, 2), "gamma": QQ(-2, 3)},
    )


def _rotation(width: int, index: int) -> Rows:
    """A rational rotation of the first plane."""
    cosine, sine, whole = _ROTATIONS[index % len(_ROTATIONS)]
    turn = [[QQ(int(r == s)) for s in range(width)] for r in range(width)]
    if width > 1:
        turn[0][:2], turn[1][:2] = [QQ(cosine, whole), QQ(-sine, whole)], [QQ(sine, whole), QQ(cosine, whole)]
    return turn


@lru_cache(maxsize=256)
def rational(layer: Layer, sizes: Sizes, seed: int = 0) -> RationalInstance:
    """An instance of exact rationals."""
    return RationalInstance(layer, sizes, draw(layer, sizes, seed), seed)


@lru_cache(maxsize=256)
def symbolic(layer: Layer, sizes: Sizes, seed: int = 0, free: str = "tokens weights") -> SymbolicInstance:
    """An instance of rational functions."""
    return SymbolicInstance(layer, sizes, draw(layer, sizes, seed), seed, free)


#: name -> (factor on tokens, factor on query and key weights, factor on values, shape of the token set)
REGIMES: dict[str, tuple[float, float, float, str]] = {
    "ordinary": (1.0, 1.0, 1.0, "random"),
    "small": (1e-4, 1.0, 1.0, "random"),
    "sharp logits": (3.0, 5.0, 1.0, "random"),
    "extreme logits": (10.0, 30.0, 1.0, "random"),
    "equal tokens": (1.0, 1.0, 1.0, "equal"),
    "antipodal tokens": (2.0, 1.0, 1.0, "antipodal"),
    "antipodal, weak logits": (2.0, 0.01, 1.0, "antipodal"),
    "tokens on a sphere": (1.0, 1.0, 1.0, "sphere"),
    "large values": (1.0, 0.1, 1e3, "random"),
    "no keys": (1.0, 0.0, 1.0, "random"),
    "one outlier": (1.0, 1.0, 1.0, "outlier"),
}


def floating(layer: Layer, seed: int, regime: str = "ordinary", sizes: Sizes | None = None) -> FloatInstance:
    """An instance of doubles in the given regime, of random sizes unless given."""
    source = random.Random(f"{seed} {regime}")
    if sizes is None:
        sizes = Sizes(
            source.randint(1 if layer.hidden != "diagonal" else 2, 5),
            source.randint(2, 3),
            source.randint(1, 3),
            source.randint(1, 3),
        )
    token, logit, value, shape = REGIMES[regime]
    p = draw(layer, sizes, seed)

    def matrix(rows: int, columns: int, factor: float = 1.0) -> Rows:
        return [[factor * source.gauss(0, 1) for _ in range(columns)] for _ in range(rows)]

    p.x = _tokens(source, sizes, shape, token)
    factors = {"W_Q": logit, "W_K": logit, "b_Q": logit * token, "b_K": logit, "W_V": value, "b_V": value, "W_O": 1.0}
    p.heads = [{n: matrix(len(m), len(m[0]), factors[n]) for n, m in head.items()} for head in p.heads]
    p.b_O, p.gamma, p.shift = matrix(sizes.D, 1), *([row[0] for row in matrix(sizes.D, 1)] for _ in range(2))
    p.B = [each(float, rows) if layer.exchangeable else matrix(sizes.T, sizes.T) for rows in p.B]
    p.m = [each(float, rows) for rows in p.m]
    p.rotations = [each(float, rows) for rows in p.rotations]
    p.scalars = {name: float(number) for name, number in p.scalars.items()} | {"c": sizes.d**-0.5}
    p.scalars["R"] = max(
        sum(value[0] ** 2 if isinstance(value, list) else value**2 for value in row) ** 0.5 for row in p.x
    )
    return FloatInstance(layer, sizes, p, seed)


def _tokens(source: random.Random, sizes: Sizes, shape: str, factor: float) -> Rows:
    rows = [[factor * source.gauss(0, 1) for _ in range(sizes.D)] for _ in range(sizes.T)]
    if shape == "equal":
        return [list(rows[0]) for _ in rows]
    if shape == "antipodal":
        return [[(-1) ** index * value for value in rows[0]] for index in range(sizes.T)]
    if shape == "sphere":
        return [[factor * value / sum(v * v for v in row) ** 0.5 for value in row] for row in rows]
    if shape == "outlier":
        rows[-1] = [100 * value for value in rows[-1]]
    return rows


def exact_instances(layer: Layer, heads: int, length: int | None, symbols: str) -> list[Instance]:
    """The exact layers of a check, cheapest first.

    Args:
        layer: the variant.
        heads: number of heads.
        length: the only number of tokens that the formula is about, or None.
        symbols: ``""`` for rationals alone, ``"small"`` to add a proof at T=2, ``"oracle"`` to add T=3 as well.
    """
    lengths = (3, 2, 4) if length is None else (length, length, length)
    found: list[Instance] = [
        rational(layer, Sizes(t, *widths, heads), seed)
        for seed, (t, widths) in enumerate(zip(lengths, ((3, 2), (2, 1), (4, 2)), strict=True))
        if t > 1 or layer.hidden != "diagonal"
    ]
    if symbols and not layer.uniform:
        free = "" if layer.norm else "tokens weights" if heads == 1 and length is None else "weights"
        found.append(symbolic(layer, Sizes(length or 2, 2, 1, heads), 7, free))
    if symbols == "oracle" and not layer.uniform and not layer.norm and length is None:
        degenerate = layer.hidden == "diagonal" and heads == 1
        found.append(symbolic(layer, Sizes(3, 2, 1, heads), 8, "weights" if degenerate else ""))
    return found


def floating_instances(layer: Layer, length: int | None, count: int = 4) -> list[Instance]:
    """Layers in doubles: every regime, several seeds, one to five tokens."""
    return [_floating(layer, seed, regime, length) for regime in REGIMES for seed in range(count)]


@lru_cache(maxsize=1024)
def _floating(layer: Layer, seed: int, regime: str, length: int | None) -> FloatInstance:
    sizes = None if length is None else Sizes(length, 2, 2, 2)
    return floating(layer, seed, regime, sizes)
