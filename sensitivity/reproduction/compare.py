"""The front door of the comparison: train what is missing, measure, and hold everything that the tables need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sensitivity.errors import RunError
from sensitivity.reproduction.paired import Difference, paired
from sensitivity.reproduction.plan import BASE, Cell, Plan
from sensitivity.reproduction.runs import Told, train_missing
from sensitivity.reproduction.sensitivities import Probe, layer_values, measure_cell
from sensitivity.sweep import Sweep
from sensitivity.traffic import Traffic, reopen

BySeed = dict[int, float]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Finished runs of a plan, side by side.

    Attributes:
        plan: what was to be trained.
        metrics: content of ``metrics.json`` by cell name, of the runs that are done.
        sweeps: sensitivities by variant and seed; empty unless measured.
        failures: why runs failed, by cell name.
    """

    plan: Plan
    metrics: Mapping[str, dict[str, Any]]
    sweeps: Mapping[str, Mapping[int, Sweep]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants with at least one finished run, in the order of the plan."""
        return tuple(name for name in self.plan.variants if self.done(name))

    def done(self, variant: str) -> tuple[Cell, ...]:
        """The finished runs of a variant."""
        return tuple(cell for cell in self.plan.cells if cell.variant == variant and cell.name in self.metrics)

    @cached_property
    def steps(self) -> tuple[str, ...]:
        """The forecast steps that were scored one by one, such as 3, 6 and 12."""
        return tuple(step for step in self._any["test"] if step != "average")

    @property
    def data(self) -> dict[str, Any]:
        """What the runs were trained and tested on."""
        return dict(self._any["data"])

    @property
    def naive(self) -> dict[str, Any]:
        """Scores of the naive forecasts on the same test windows."""
        return dict(self._any["naive"])

    @property
    def has_base(self) -> bool:
        """Whether there is something to take differences to."""
        return BASE in self.variants

    def minutes(self, step: str) -> float:
        """How far ahead a step lies."""
        return int(step) * float(self.data["step_minutes"])

    def scores(self, variant: str, step: str, metric: str) -> BySeed:
        """A test error of a variant, by seed; what is undefined (no valid target for MAPE) is NaN."""
        found = {cell.seed: self.metrics[cell.name]["test"][step][metric] for cell in self.done(variant)}
        return {seed: math.nan if value is None else float(value) for seed, value in found.items()}

    def difference(self, variant: str, step: str, metric: str) -> Difference:
        """The paired difference of a test error to the variant ``none``."""
        return paired(self.scores(variant, step, metric), self.scores(BASE, step, metric))

    # -- sensitivity ---------------------------------------------------------------------------------------------

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The sequence lengths at which every model was measured."""
        found = [set(sweep.lengths) for by_seed in self.sweeps.values() for sweep in by_seed.values()]
        return tuple(sorted(set.intersection(*found))) if found else ()

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Names of the attention layers that all models have."""
        found = [sweep.layers for by_seed in self.sweeps.values() for sweep in by_seed.values()]
        return tuple(name for name in found[0] if all(name in layers for layers in found)) if found else ()

    def sensitivity(self, variant: str, statistic: str, length: int, layer: str | None = None) -> BySeed:
        r"""A statistic of a variant's models, by seed: of one layer, or the geometric mean over all.

        The geometric mean, because differences are taken as ratios. Zero where a layer has an exact zero (the value
        path on the diagonal under a mask).
        """
        layers = self.layers if layer is None else (layer,)
        found = {}
        for seed, sweep in self.sweeps.get(variant, {}).items():
            values = layer_values(sweep, length)
            found[seed] = _geometric([values[name].get(statistic, math.nan) for name in layers])
        return found

    def ratio(self, variant: str, statistic: str, length: int) -> Difference:
        """The factor by which a statistic differs from that of the variant ``none``, paired, from its logarithms.

        An exact zero has no logarithm: then the factor is 0, without an interval.
        """
        values, base = self.sensitivity(variant, statistic, length), self.sensitivity(BASE, statistic, length)
        if values and all(value == 0 for value in values.values()):
            return Difference(0.0, math.nan, math.nan, len(values))
        one = paired(_logarithms(values), _logarithms(base))
        return Difference(math.exp(one.mean), math.exp(one.low), math.exp(one.high), one.pairs)

    def __repr__(self) -> str:
        runs = ", ".join(f"{name} x {len(self.done(name))}" for name in self.variants)
        return f"Comparison on {self.data['name']}: {runs}; T={', '.join(map(str, self.lengths)) or 'not measured'}"

    @property
    def _any(self) -> dict[str, Any]:
        return next(iter(self.metrics.values()))


def reproduce(
    plan: Plan,
    probe: Probe | None = None,
    *,
    jobs: int = 1,
    told: Told = lambda cell, state: None,
    measured: Callable[[Cell], None] = lambda cell: None,
) -> Comparison:
    """Trains what the plan lacks, and measures every model.

    What was interrupted is taken up: finished runs are not trained again, a run that was cut off goes on from its last
    epoch, and models that were measured under the same settings are not measured again.

    Args:
        plan: variants x seeds.
        probe: what to measure of every model; nothing if None.
        jobs: runs that are trained at a time, in processes of their own if more than one.
        told: is told which run begins and how it ends.
        measured: is told which run has been measured.

    Raises:
        InputError: settings or data that cannot be used, a folder that holds something else.
        RunError: every run failed.
        Interrupted: Ctrl-C; call again to go on.
    """
    plan.claim()
    failures = train_missing(plan, jobs, told)
    metrics = {cell.name: cell.metrics() for cell in plan.cells if cell.done}
    if not metrics:
        name, reason = next(iter(failures.items()))
        raise RunError(f"all {len(failures)} runs failed; the first, {name}: {reason}")
    found = Comparison(plan, metrics, failures=failures)
    return found if probe is None else _measured(found, probe, measured)


def _measured(found: Comparison, probe: Probe, told: Callable[[Cell], None]) -> Comparison:
    sweeps: dict[str, dict[int, Sweep]] = {}
    traffic: Traffic | None = None
    for variant in found.variants:
        for cell in found.done(variant):
            traffic = reopen(found.data) if traffic is None else traffic
            sweeps.setdefault(variant, {})[cell.seed] = measure_cell(cell, probe, traffic)
            told(cell)
    return Comparison(found.plan, found.metrics, sweeps, found.failures)


def _geometric(values: list[float]) -> float:
    if any(value == 0 for value in values):
        return 0.0
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def _logarithms(values: BySeed) -> BySeed:
    return {seed: math.log(value) if value > 0 else math.nan for seed, value in values.items()}
