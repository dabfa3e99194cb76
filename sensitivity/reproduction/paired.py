r"""Differences between runs that share a seed, with an interval over the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    r"""The mean of paired differences.

    .. math::

        \bar d \pm t_{n-1,\,0.975}\, s_d / \sqrt{n}, \qquad d_s = x_s - y_s

    Attributes:
        mean: of the differences.
        low: lower end of the interval; NaN with fewer than two pairs.
        high: upper end.
        pairs: how many seeds both have.
    """

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> str:
        """``lower`` or ``higher`` where the interval leaves out 0, else ``not shown``; ``-`` without an interval."""
        if math.isnan(self.low):
            return "-"
        return "lower" if self.high < 0 else "higher" if self.low > 0 else "not shown"


def paired(values: Mapping[int, float], base: Mapping[int, float], confidence: float = CONFIDENCE) -> Difference:
    """The mean difference between two variants over the seeds that both have, with Student's interval.

    Args:
        values: by seed.
        base: by seed, of the variant to compare with.
        confidence: nominal coverage, for normal differences.

    >>> one = paired({0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.0, 1: 1.0, 2: 1.0})
    >>> round(one.mean, 3), round(one.low, 3), round(one.high, 3)
    (2.0, -0.484, 4.484)
    """
    seeds = sorted(set(values) & set(base))
    differences = np.array([values[seed] - base[seed] for seed in seeds], dtype=float)
    differences = differences[np.isfinite(differences)]
    count = len(differences)
    if count < 2:
        return Difference(float(differences.mean()) if count else math.nan, math.nan, math.nan, count)
    from scipy.stats import t

    mean = float(differences.mean())
    half = float(t.ppf(0.5 + confidence / 2, count - 1) * differences.std(ddof=1) / math.sqrt(count))
    return Difference(mean, mean - half, mean + half, count)
