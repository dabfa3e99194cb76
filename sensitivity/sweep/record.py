"""What a sweep found out about one layer at one length."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from sensitivity.statistics import Statistic
from sensitivity.sweep.bounds import Verdict

OFF_PATHS, ON_PATHS = ("value", "key"), ("residual", "value", "key", "query")


@dataclass(frozen=True)
class Record:
    """One layer at one length.

    Attributes:
        name: the layer.
        length: time steps.
        statistics: by name; each is that of the mean map, with the values of all ``.samples`` and the ``.null``.
        groups: the independent unit of every sample, ``(sample,)``.
        profiles: ``lag`` and ``lag_residual_removed`` ``(lag,)``, ``primacy`` ``(key,)``.
        maps: mean maps over samples: ``norms``, ``value``, ``key``, ``attention`` (mean over heads), ``attended`` and
            ``visible`` ``(query, key)``; ``diagonal`` (residual removed), ``residual`` and ``query`` ``(query,)``;
            empty if not kept.
        bounds: verdicts by name.
    """

    name: str
    length: int
    statistics: dict[str, Statistic]
    groups: Int[Tensor, " sample"]
    profiles: dict[str, Tensor] = field(default_factory=dict)
    maps: dict[str, Tensor] = field(default_factory=dict)
    bounds: dict[str, Verdict] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """Number of independent units."""
        return len(self.groups.unique())

    def by_unit(self, statistic: str) -> dict[int, float]:
        """Mean of a statistic over the samples of each independent unit."""
        samples = self.statistics[statistic].samples
        if samples is None:
            return {}
        units, place = self.groups.unique(return_inverse=True)
        sums = torch.zeros(len(units), dtype=torch.float64).scatter_add_(0, place, samples.double())
        return dict(zip(units.tolist(), (sums / place.bincount()).tolist(), strict=True))
