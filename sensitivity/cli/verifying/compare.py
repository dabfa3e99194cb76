"""Closed forms beside automatic differentiation, bounds beside what is measured, the law beside simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.bounds import BoundCheck, Law, check
from sensitivity.bounds import law as predict
from sensitivity.bounds.checking import NAMES
from sensitivity.jacobian import autodiff, closed_form
from sensitivity.sweep.source import Sequences, batches

ALL_ROWS, ROWS = 128, 64  # the length up to which all query rows are checked, and how many beyond
SEQUENCES = 64  # of a batch
WHOLE_MAP = 128 * 72  # time x dim up to which the whole Jacobian of a sequence is taken as one matrix
STACKED = 32  # tokens up to which a stack of layers is checked
AUTODIFF = 24 * 72  # time x dim up to which a sequence is differentiated
AGREEMENT = 1e-8


@dataclass
class Tally:
    """One bound over all layers and lengths."""

    name: str
    violations: int = 0
    blocks: int = 0
    tightness: list[float] = field(default_factory=list)
    closest: float = math.nan
    first: str = ""
    broken: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    def add(self, found: BoundCheck, where: str) -> None:
        """Counts one check."""
        if not found.applies:
            self.reason = self.reason or found.reason
            return
        self.violations += found.violations
        self.blocks += found.blocks
        if not math.isnan(found.tightness):
            self.tightness.append(found.tightness)
        closest = found.quantiles.get(1.0, math.nan)
        self.closest = closest if math.isnan(self.closest) else max(self.closest, closest)
        if found.violations and not self.first:
            place = ", ".join(
                f"{axis} {at}" for axis, at in zip(("sample", "query", "key"), found.where or (), strict=False)
                if at is not None
            )  # fmt: skip
            self.first = f"{where}, {place}"
        self.broken |= {text: one.value for text, one in found.assumptions.items() if one.required and not one.held}


@dataclass
class Findings:
    """Everything that was compared.

    Attributes:
        bounds: one tally per bound.
        disagreement: largest difference of closed form and autodiff, relative to the largest norm.
        differentiated: how many blocks that covers.
    """

    bounds: dict[str, Tally]
    disagreement: float = math.nan
    differentiated: int = 0

    def faults(self) -> list[str]:
        """What contradicts theory, in words."""
        found = []
        if self.disagreement > AGREEMENT:
            found.append(f"closed form and autodiff differ by {self.disagreement:.2g}")
        for tally in self.bounds.values():
            if tally.violations:
                many = f"{tally.violations} violation{'s' if tally.violations > 1 else ''}"
                found.append(f"{many} of the bound {tally.name!r}, the first in {tally.first}")
        return found


def verify(job: Any) -> Findings:
    """Compares everything at every length."""
    found = Findings({name: Tally(name) for name in NAMES})
    for length in job.lengths:
        for batch in batches(job.source(length)):
            for name, sequences in batch.layers.items():
                _one_layer(found, name, sequences, length, job.norm)
            _stacked(found, list(batch.layers.values()), length, job)
    return found


def _one_layer(found: Findings, name: str, sequences: Sequences, length: int, norm: Any) -> None:
    some = slice(None, None, -(-len(sequences.tokens) // SEQUENCES))
    attention, tokens = sequences.attention.sample(some), sequences.tokens[some]
    names = [bound for bound in NAMES if bound != "stack"]
    if length * attention.dim > WHOLE_MAP:
        names.remove("lipschitz")
    rows = None if length <= ALL_ROWS else ROWS
    for bound, one in check(attention, tokens, names, norm, rows=rows).items():
        found.bounds[bound].add(one, f"{name} at T={length}")
    if length * attention.dim <= AUTODIFF:
        worst = _disagreement(attention.sample(slice(0, 1)), tokens[:1])
        found.disagreement = worst if math.isnan(found.disagreement) else max(worst, found.disagreement)
        found.differentiated += length**2


def _disagreement(attention: SoftmaxAttention, tokens: Tensor) -> float:
    attention, tokens = attention.to(dtype=torch.float64), tokens.double()
    exact = closed_form.norm_maps(attention, tokens).total.nan_to_num()
    truth = autodiff.norm_maps(attention, tokens).total
    if attention.padding is not None:
        left_out = attention.padding[:, :, None] | attention.padding[:, None, :]
        truth = truth.masked_fill(left_out, 0.0)
    return float((exact - truth).abs().max() / truth.max().clamp_min(1e-300))


def _stacked(found: Findings, layers: list[Sequences], length: int, job: Any) -> None:
    """Random layers are stacked one on another; a model's layers have other parts in between."""
    stack = found.bounds["stack"]
    if "random" not in job.settings:
        stack.reason = "the layers of a model have other parts between them"
    elif len(layers) < 2:
        stack.reason = "a stack needs at least two layers"
    elif length <= STACKED:
        attentions = [sequences.attention for sequences in layers]
        few = layers[0].tokens[:2]
        stack.add(check(attentions, few, norm=job.norm)["stack"], f"the stack at T={length}")
    else:
        stack.reason = stack.reason or f"checked up to T={STACKED}"


@dataclass
class Comparison:
    """The law of one layer beside what was measured: root mean square off the diagonal, mean on it, by length."""

    name: str
    law: Law
    off_diagonal: list[float]
    diagonal: list[float]


def laws(job: Any) -> list[Comparison]:
    """The law of every random layer at the lengths of the job."""
    sums: dict[str, list[tuple[float, float]]] = {}
    attentions: dict[str, SoftmaxAttention] = {}
    for length in job.lengths:
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for batch in batches(job.source(length)):
            for name, sequences in batch.layers.items():
                attentions[name] = sequences.attention
                parts.setdefault(name, []).append(_measured(sequences))
        for name, found in parts.items():
            off, on = (torch.cat(part) for part in zip(*found, strict=True))
            sums.setdefault(name, []).append((float(off.mean().sqrt()), float(on.mean())))
    return [
        Comparison(name, predict(attentions[name], job.lengths), *map(list, zip(*found, strict=True)))
        for name, found in sums.items()
    ]


def _measured(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Mean square off the diagonal and mean norm on it, of every sequence."""
    attention, tokens = sequences.attention.to(dtype=torch.float64), sequences.tokens.double()
    norms = closed_form.norm_maps(attention, tokens, weights=False).total
    length = tokens.shape[1]
    visible = ~attention.hidden(length)[0].all(dim=0) & ~torch.eye(length, dtype=torch.bool, device=tokens.device)
    off = (norms.square() * visible).sum(dim=(1, 2)) / visible.sum()
    return off, norms.diagonal(dim1=1, dim2=2).mean(dim=1)
