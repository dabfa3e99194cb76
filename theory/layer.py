"""The forward map of one attention layer over any numbers: what the derivations differentiate.

The map is written once and run over rationals, rational functions, duals, SymPy expressions and floats. It knows
nothing of any Jacobian. Exponentials, square roots and the point where a variable is declared free are left to
:class:`Numbers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from theory.arithmetic import Number, Rows, column, plus, product, scaled, transposed

Table = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """Which variant of the layer a formula is about.

    Attributes:
        hidden: which pairs the mask hides: ``"none"``, ``"diagonal"`` (-inf on the diagonal) or ``"causal"``.
        penalty: whether the diagonal logits get a finite ``beta``.
        multiplier: whether weights are multiplied by ``m_ij`` after the softmax.
        rotary: whether queries and keys are rotated by ``Theta_i``.
        residual: whether the token is added to the attention's output.
        gated: whether it is multiplied by ``gamma`` before.
        norm: ``""``, ``"pre"`` (tokens are normalised before attention) or ``"post"`` (the sum is normalised).
        uniform: whether all logits of a row are equal before the penalty.
        exchangeable: whether no bias tells positions apart, so that tokens may be permuted.
    """

    hidden: str = "none"
    penalty: bool = False
    multiplier: bool = False
    rotary: bool = False
    residual: bool = True
    gated: bool = False
    norm: str = ""
    uniform: bool = False
    exchangeable: bool = False

    def hides(self, query: int, key: int) -> bool:
        """Whether the mask hides this pair."""
        return (self.hidden == "diagonal" and query == key) or (self.hidden == "causal" and key > query)


@dataclass(frozen=True)
class Sizes:
    """Tokens, token width, head width, heads."""

    T: int
    D: int
    d: int
    H: int


@dataclass
class Parameters:
    """The numbers of one layer and one sequence; ``e`` are the unnormalised weights where logits stay abstract."""

    x: Rows
    heads: list[dict[str, Rows]]
    b_O: Rows  # noqa: N815 - the field's name
    B: list[Rows]
    m: list[Rows]
    e: list[Rows]
    rotations: list[Rows]
    gamma: list[Number]
    shift: list[Number]
    sigma: list[Number]
    scalars: dict[str, Number] = field(default_factory=dict)


class Numbers:
    """How one kind of number takes exponentials and roots, and which variable is free (``cut``)."""

    cut = ""

    def seed(self, name: str, index: tuple[int, ...], value: Number) -> Number:
        """The value at this place of the forward map, made a free variable if the map is cut there."""
        return value

    def exponentials(self, head: int, query: int, scores: list[Number | None]) -> list[Number]:
        """The exponentials of one row of scores (up to a common factor); None is a hidden pair."""
        raise NotImplementedError

    def root(self, time: int, value: Number) -> Number:
        """The square root of a variance."""
        raise NotImplementedError


def forward(layer: Layer, sizes: Sizes, p: Parameters, numbers: Numbers) -> Table:
    """Runs the layer; the table holds every intermediate quantity by name, heads first."""
    times = range(sizes.T)
    x = [[[numbers.seed("x", (i, r), p.x[i][r])] for r in range(sizes.D)] for i in times]
    table: Table = {"x": x, "b_O": p.b_O, "B": p.B, "m": p.m, "Rot": p.rotations}
    table |= {name: [head[name] for head in p.heads] for name in p.heads[0]}
    tokens = x
    if layer.norm == "pre":
        _normalise(table, x, sizes, p, numbers)
        tokens = table["z"]
    heads = [_head(layer, sizes, p, numbers, tokens, index) for index in range(sizes.H)]
    table |= {name: [head[name] for head in heads] for name in heads[0]}
    u = []
    for i in times:
        token = scaled(p.scalars["gamma"], x[i]) if layer.gated else x[i]
        state = plus(token, p.b_O) if layer.residual else p.b_O
        for h in range(sizes.H):
            state = plus(state, product(p.heads[h]["W_O"], table["o"][h][i]))
        u.append([[numbers.seed("u", (i, r), state[r][0])] for r in range(sizes.D)])
    table["u"] = table["h"] = u
    if layer.norm == "post":
        _normalise(table, u, sizes, p, numbers)
        table["h"] = table["z"]
    return table


def _head(layer: Layer, sizes: Sizes, p: Parameters, numbers: Numbers, tokens: list[Rows], h: int) -> Table:
    """Queries, keys, values, scores, weights and their means, for one head."""
    times, w = range(sizes.T), p.heads[h]
    q, k, v = ([plus(product(w[f"W_{s}"], tokens[i]), w[f"b_{s}"]) for i in times] for s in "QKV")
    turned = [[product(p.rotations[i], y[i]) for i in times] for y in (q, k)] if layer.rotary else [q, k]
    scores: list[list[Number]] = []
    weights: list[list[Number]] = []
    rest: list[list[Number]] = []
    for i in times:
        row = []
        for t in times:
            value = p.scalars["c"] * product(transposed(turned[0][i]), turned[1][t])[0][0] + p.B[h][i][t]
            if layer.penalty and i == t:
                value = value + numbers.seed("beta", (), p.scalars["beta"])
            row.append(numbers.seed("s", (h, i, t), value))
        seen = [None if layer.hides(i, t) else row[t] for t in times]
        weights.append(_normalised(numbers.exponentials(h, i, seen)))
        rest.append(_leave_one_out(weights[i], i))
        scores.append(row)
    return _row_means(
        {"q": q, "k": k, "v": v, "s": scores, "a": weights, "b": rest},
        turned[1],
        tokens,
        p.m[h] if layer.multiplier else None,
    )


def _row_means(head: Table, keys: list[Rows], tokens: list[Rows], multiplier: Rows | None) -> Table:
    """Means and covariances under each row's weights."""
    values, times = head["v"], range(len(keys))
    sent = (
        head["a"]
        if multiplier is None
        else [[m * a for m, a in zip(*rows, strict=True)] for rows in zip(multiplier, head["a"], strict=True)]
    )
    head["o"] = [_mean(row, values) for row in sent]
    for weights, names in ((head["a"], ("vbar", "kbar", "Cov")), (head["b"], ("vrest", "krest", "Crest"))):
        head[names[0]] = [_mean(row, values) for row in weights]
        head[names[1]] = [_mean(row, keys) for row in weights]
        head[names[2]] = [_covariance(row, values, keys) for row in weights]
    head["xbar"] = [_mean(row, tokens) for row in head["a"]]
    head["X"] = [_covariance(row, tokens, tokens) for row in head["a"]]
    head["gap"] = [[[head["s"][i][j] - head["s"][i][t] for t in times] for j in times] for i in times]
    return head


def _normalised(values: list[Number]) -> list[Number]:
    whole = sum(values)
    return [value / whole for value in values]


def _leave_one_out(weights: list[Number], skip: int) -> list[Number]:
    """The weights with one key left out; zeros where nothing is left."""
    kept = [weight * 0 if key == skip else weight for key, weight in enumerate(weights)]
    whole = sum(kept)
    try:
        return [weight / whole for weight in kept]
    except ZeroDivisionError:
        return kept


def _mean(weights: list[Number], vectors: list[Rows]) -> Rows:
    mean = scaled(weights[0], vectors[0])
    for weight, vector in zip(weights[1:], vectors[1:], strict=True):
        mean = plus(mean, scaled(weight, vector))
    return mean


def _covariance(weights: list[Number], left: list[Rows], right: list[Rows]) -> Rows:
    means = _mean(weights, left), _mean(weights, right)
    centred = [
        [plus(vector, scaled(-1, mean)) for vector in vectors]
        for vectors, mean in zip((left, right), means, strict=True)
    ]
    return _mean(weights, [product(one, transposed(two)) for one, two in zip(*centred, strict=True)])


def _normalise(table: Table, vectors: list[Rows], sizes: Sizes, p: Parameters, numbers: Numbers) -> None:
    """Layer normalisation ``z = gamma (u - mean) / sigma + shift`` of every vector, with its parts."""
    table["uhat"], table["sigma"], table["z"] = [], [], []
    for i, vector in enumerate(vectors):
        mean = sum(row[0] for row in vector) / sizes.D
        centred = [row[0] - mean for row in vector]
        sigma = numbers.root(i, sum(value * value for value in centred) / sizes.D + p.scalars["epsilon"])
        unit = [value / sigma for value in centred]
        table["sigma"].append(sigma)
        table["uhat"].append(column(unit))
        table["z"].append(
            column([factor * value + shift for factor, value, shift in zip(p.gamma, unit, p.shift, strict=True)])
        )
    table["Gamma"] = [[factor if r == s else 0 for s in range(sizes.D)] for r, factor in enumerate(p.gamma)]
    table["one"] = column([1] * sizes.D)
