"""The bounds of a sweep: checked on some sequences and rows of every layer at every length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.bounds import BoundCheck, check
from sensitivity.bounds.problem import Problem
from sensitivity.jacobian.norms import Norm

DEFAULT = (
    "local",
    "triangle",
    "expected",
    "expected_ball",
    "worst_case",
    "diagonal",
    "diagonal_ball",
    "diagonal_lower",
)
"""Bounds of single blocks and rows; ``lipschitz``, of the whole Jacobian, is checked where it is named."""
SEQUENCES, ROWS, OVERLAID = 16, 32, 4
WHOLE_MAP = 128 * 72  # time x dim up to which the whole Jacobian of a sequence is taken as one matrix


@dataclass(frozen=True)
class Verdict:
    """How one bound fared on one layer at one length; NaN where there is nothing to say.

    Attributes:
        name: the bound's name in ``theory``.
        applies: whether it says anything about the layer.
        violations: comparisons with measured > bound.
        blocks: blocks of the Jacobian that were compared.
        tightness: median of measured / bound.
        closest: largest measured / bound.
        bound: mean of the bound.
        measured: mean of what was measured there.
        slack: mean of the bound over mean of what was measured, off the diagonal; NaN for bounds of something else.
        assumptions: what the bound assumes: whether it holds here, and the number that says so.
        reason: why it does not apply.
    """

    name: str
    applies: bool
    violations: int = 0
    blocks: int = 0
    tightness: float = math.nan
    closest: float = math.nan
    bound: float = math.nan
    measured: float = math.nan
    slack: float = math.nan
    assumptions: dict[str, tuple[bool, float]] = field(default_factory=dict)
    reason: str = ""

    @classmethod
    def of(cls, found: BoundCheck) -> Verdict:
        """The verdict of a check."""
        same = {name: getattr(found, name) for name in _SAME}
        held = {text: (bool(item.held), float(item.value)) for text, item in found.assumptions.items()}
        return cls(**same, closest=found.quantiles.get(1.0, math.nan), assumptions=held)

    def plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = dataclasses.asdict(self)
        values["assumptions"] = [{"text": text, "holds": h, "value": v} for text, (h, v) in self.assumptions.items()]
        return values

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Verdict:
        """The verdict that :meth:`plain` described; None stands for NaN."""
        held = {one["text"]: (one["holds"], _number(one["value"])) for one in values["assumptions"]}
        numbers = {name: _number(values[name]) for name in ("tightness", "closest", "bound", "measured", "slack")}
        return cls(**(values | numbers | {"assumptions": held}))


_SAME = ("name", "applies", "violations", "blocks", "tightness", "bound", "measured", "reason")


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class BoundSample:
    """Gathers some sequences of a layer while it is measured, and checks the bounds on them.

    Bounds cost more than the measurement, so they are checked on at most 16 sequences, spread over the batches, and 32
    query rows of each, spread over time. The bound on the whole Jacobian is left out where that is large.

    Args:
        names: bounds to check.
        norm: of the blocks.
    """

    def __init__(self, names: Sequence[str], norm: Norm) -> None:
        self.names, self.norm = tuple(names), norm
        self._attention: SoftmaxAttention | None = None
        self._tokens: list[Tensor] = []

    def update(self, attention: SoftmaxAttention, tokens: Tensor) -> None:
        """Takes some sequences of a batch."""
        own_masks = any(
            value is not None and value.shape[0] > 1
            for value in (attention.bias, attention.multiplier, attention.padding)
        )
        if self._attention is not None and own_masks:
            return  # sequences with masks of their own cannot be joined with those of other batches
        chosen = slice(None, None, max(1, -(-len(tokens) // SEQUENCES)))
        self._attention = attention.sample(chosen)
        self._tokens.append(tokens[chosen].clone())

    def finish(self) -> dict[str, Verdict]:
        """The verdict on every bound."""
        if self._attention is None or not self.names:
            return {}
        tokens = torch.cat(self._tokens)
        chosen = slice(None, None, max(1, -(-len(tokens) // SEQUENCES)))
        attention, tokens = self._attention.sample(chosen), tokens[chosen]
        length, dim = tokens.shape[1:]
        small = length * dim <= WHOLE_MAP
        names = [name for name in self.names if small or name != "lipschitz"]
        found = {name: Verdict.of(one) for name, one in check(attention, tokens, names, self.norm, rows=ROWS).items()}
        if len(names) < len(self.names):
            reason = f"not checked: the whole Jacobian of a sequence has {length * dim} rows, over {WHOLE_MAP}"
            found["lipschitz"] = Verdict("lipschitz", applies=False, reason=reason)
        for name, slack in self._slack(attention, tokens, found).items():
            found[name] = dataclasses.replace(found[name], slack=slack)
        return {name: found[name] for name in self.names}

    def _slack(self, attention: SoftmaxAttention, tokens: Tensor, found: dict[str, Verdict]) -> dict[str, float]:
        """Mean bound over mean norm off the diagonal: as checked, or, for bounds of all pairs, on a few sequences."""
        slack = {
            name: found[name].bound / found[name].measured for name in _OFF_DIAGONAL if _above_zero(found.get(name))
        }
        wanted = [name for name in ("local", "triangle") if _above_zero(found.get(name))]
        few = slice(None, None, max(1, -(-len(tokens) // OVERLAID)))
        problem = Problem(attention.sample(few), tokens[few], self.norm, ROWS)
        measured = float(problem.measured[problem.off].sum()) if wanted else 0.0
        if measured > 0:
            bounds = dict(zip(("local", "triangle"), problem.local, strict=False))
            slack |= {name: float(bounds[name][problem.off].sum()) / measured for name in wanted}
        return slack


_OFF_DIAGONAL = ("expected", "expected_ball", "worst_case")


def _above_zero(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.applies and verdict.measured > 0
