r"""How fast sensitivity decays with sequence length: :math:`S \sim T^{-b}` fitted on logarithms."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.errors import InputError, SensitivityWarning

MINIMUM_LENGTHS = 4


@dataclass(frozen=True)
class Decay:
    r"""A fitted power law :math:`S(T) = e^a T^{-b}`.

    Attributes:
        exponent: :math:`b`; 1 where sensitivity is diluted over all keys, 0 where it does not depend on the length.
        interval: its confidence interval, from resampling samples; NaN where there is a single sample.
        r_squared: share of the variance of the log means that the line explains. Near 0 where there is nothing to
            explain: a constant sensitivity, exponent 0.
        intercept: :math:`a`.
        lengths: the lengths that were fitted.
        confidence: nominal coverage of the interval.
        notes: what was left out, and why.
    """

    exponent: float
    interval: tuple[float, float]
    r_squared: float
    intercept: float
    lengths: tuple[int, ...]
    confidence: float = 0.95
    notes: tuple[str, ...] = field(default=())

    def predict(self, lengths: Any) -> Float[Tensor, " length"]:
        """The fitted sensitivity at these lengths."""
        return math.exp(self.intercept) * torch.as_tensor(lengths, dtype=torch.float64) ** -self.exponent

    def __str__(self) -> str:
        low, high = self.interval
        spread = "one sample: no interval" if math.isnan(low) else f"{self.confidence:.0%}: {low:.3f} to {high:.3f}"
        return f"exponent {self.exponent:.3f} ({spread}), R2 {self.r_squared:.3f}"


def decay_exponent(
    lengths: Sequence[int],
    values: Any,
    *,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Decay | None:
    r"""Fits :math:`\log \bar S(T) = a - b \log T` by weighted least squares; :math:`\bar S` is the mean over samples.

    The weights are the inverse variances of :math:`\log \bar S`, (standard error / mean) squared. The points of one
    sample over the lengths depend on each other, so the interval comes from resampling whole samples (Efron and
    Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 6 and 12): the weights and the line are refitted to
    every resample, and the standard deviation of the exponents, corrected by :math:`\sqrt{n / (n - 1)}`, is multiplied
    by Student's t with n - 1 degrees of freedom. Percentile intervals are far too short for a handful of samples.

    Args:
        lengths: distinct sequence lengths, at least 1.
        values: mean sensitivity of every sample at every length, ``(sample, length)``; any array.
        resamples: number of bootstrap draws.
        confidence: nominal coverage of the interval.
        seed: seed of the bootstrap's own generator.

    Returns:
        The fit; None with fewer than four usable lengths. A length at which some sample is zero or NaN (no pair off the
        diagonal at T = 1) has no logarithm: it is left out with a note, or a warning where fewer than four remain.

    Raises:
        InputError: shapes that disagree, repeated lengths, a negative or infinite value.

    Examples:
        >>> lengths = [8, 16, 32, 64]
        >>> fit = decay_exponent(lengths, [[3 / T for T in lengths], [5 / T for T in lengths]])
        >>> round(fit.exponent, 6), [round(bound, 6) for bound in fit.interval]
        (1.0, [1.0, 1.0])
    """
    table = _check(lengths, values)
    usable = (table > 0).all(dim=0)
    kept = tuple(int(T) for T, ok in zip(lengths, usable, strict=True) if ok)
    notes = tuple(f"T={T} left out: a sample is zero or undefined there" for T in lengths if T not in kept)
    if len(kept) < MINIMUM_LENGTHS:
        if notes:
            warnings.warn(
                f"no decay exponent: {len(kept)} usable lengths of {len(lengths)}, {MINIMUM_LENGTHS} are needed "
                f"({'; '.join(notes)}).",
                SensitivityWarning,
                stacklevel=2,
            )
        return None
    table = table[:, usable]
    x = torch.tensor(kept, dtype=torch.float64).log()
    mean = table.mean(dim=0, keepdim=True)
    weights = _weights(mean, table.var(dim=0, keepdim=True, correction=0))
    slope, intercept = (float(part) for part in _line(x, mean.log(), weights))
    logs, shares = mean[0].log(), weights[0]
    unexplained = float((shares * (logs - intercept - slope * x) ** 2).sum())
    spread = float((shares * (logs - (shares * logs).sum()) ** 2).sum())
    r_squared = 1.0 if spread <= 1e-24 else max(0.0, 1 - unexplained / spread)
    interval = _interval(table, x, -slope, resamples, confidence, seed)
    return Decay(-slope, interval, r_squared, intercept, kept, confidence, notes)


def _check(lengths: Sequence[int], values: Any) -> Float[Tensor, "sample length"]:
    table = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    if table.ndim != 2 or table.shape[1] != len(lengths) or table.shape[0] == 0:
        raise InputError(
            f"values have shape {tuple(table.shape)}, but a fit over {len(lengths)} lengths needs (sample, length) = "
            f"(at least 1, {len(lengths)})."
        )
    if len(set(lengths)) != len(lengths):
        raise InputError(f"lengths repeat: {list(lengths)}; average the values of equal lengths first.")
    if any(T < 1 for T in lengths):
        raise InputError(f"lengths must be at least 1, not {min(lengths)}.")
    bad = (table < 0) | table.isinf()
    if bad.any():
        sample, at = (int(part) for part in bad.nonzero()[0])
        raise InputError(
            f"the value of sample {sample} at T={lengths[at]} is {float(table[sample, at])}: a sensitivity is finite "
            "and not negative; fit norms, not differences or logarithms of them."
        )
    return table


def _weights(
    mean: Float[Tensor, "draw length"], variance: Float[Tensor, "draw length"]
) -> Float[Tensor, "draw length"]:
    """Inverse variances of the log means, normed to sum 1; equal where the samples do not show a spread.

    A variance from few samples may be tiny by chance, so none counts as less than a tenth of the largest.
    """
    relative = variance / mean**2
    largest = relative.amax(dim=-1, keepdim=True)
    floored = torch.maximum(relative, largest / 10)
    inverse = torch.where(largest > 1e-24, 1 / floored.clamp(min=1e-30), 1.0)
    return inverse / inverse.sum(dim=-1, keepdim=True)


def _line(
    x: Float[Tensor, " length"], y: Float[Tensor, "draw length"], weights: Float[Tensor, "draw length"]
) -> tuple[Float[Tensor, " draw"], Float[Tensor, " draw"]]:
    """Slope and intercept of the weighted least-squares line through every row of ``y``."""
    centre = (weights * x).sum(dim=-1)
    offset = x - centre[:, None]
    slope = (weights * offset * y).sum(dim=-1) / (weights * offset**2).sum(dim=-1)
    return slope, (weights * y).sum(dim=-1) - slope * centre


def _interval(
    table: Float[Tensor, "sample length"],
    x: Float[Tensor, " length"],
    exponent: float,
    resamples: int,
    confidence: float,
    seed: int,
) -> tuple[float, float]:
    """Student's t times the standard deviation of the refitted exponent over resampled samples."""
    samples = len(table)
    if samples < 2:
        return math.nan, math.nan
    from scipy import stats

    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(samples, (resamples, samples), generator=generator)
    share = torch.zeros(resamples, samples, dtype=torch.float64)
    share.scatter_add_(1, picks, torch.full((resamples, samples), 1 / samples, dtype=torch.float64))
    mean = share @ table
    variance = share @ (table - table.mean(dim=0)) ** 2 - (mean - table.mean(dim=0)) ** 2
    slope, _ = _line(x, mean.log(), _weights(mean, variance))
    error = float(slope.std()) * math.sqrt(samples / (samples - 1))
    width = float(stats.t.ppf((1 + confidence) / 2, samples - 1)) * error
    return exponent - width, exponent + width
