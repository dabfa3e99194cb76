"""Decay exponents: known power laws, and how often the interval covers the truth."""

from __future__ import annotations

import math

import pytest
import torch

from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.fit import Decay, decay_exponent

LENGTHS = [8, 16, 32, 64, 128, 256]


def power_law(exponent, samples=1, factor=3.0):
    factors = factor * torch.arange(1, samples + 1, dtype=torch.float64)
    return factors[:, None] * torch.tensor(LENGTHS, dtype=torch.float64) ** -exponent


def noisy(samples, seed, exponent=1.0, spread=0.2, shared=0.7):
    """Log-normal noise with mean 1; a part of it is shared by all lengths of one sample."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    noise = math.sqrt(shared) * draw(samples, 1) + math.sqrt(1 - shared) * draw(samples, len(LENGTHS))
    return power_law(exponent) * torch.exp(spread * noise - spread**2 / 2)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0, -0.3])
@pytest.mark.parametrize("samples", [1, 2, 5])
def test_recovers_an_exact_power_law(exponent, samples):
    fit = decay_exponent(LENGTHS, power_law(exponent, samples))
    assert fit.exponent == pytest.approx(exponent, abs=1e-12)
    assert fit.r_squared == pytest.approx(1.0, abs=1e-9)
    assert math.exp(fit.intercept) == pytest.approx(3.0 * (samples + 1) / 2)
    assert fit.predict([1000]).item() == pytest.approx(3.0 * (samples + 1) / 2 * 1000**-exponent)
    if samples == 1:
        assert all(math.isnan(bound) for bound in fit.interval)
    else:
        assert fit.interval == pytest.approx((exponent, exponent), abs=1e-12)


@pytest.mark.parametrize(("samples", "shared"), [(5, 0.0), (8, 0.7), (24, 0.7)])
def test_the_interval_covers_the_truth_at_its_nominal_rate(samples, shared):
    repeats = 200
    fits = [decay_exponent(LENGTHS, noisy(samples, r, shared=shared), resamples=300, seed=r) for r in range(repeats)]
    rate = sum(fit.interval[0] <= 1.0 <= fit.interval[1] for fit in fits) / repeats
    assert 0.90 <= rate <= 0.985  # 0.95 with two to three standard errors of 200 repeats


def test_resampling_samples_sees_that_the_points_of_a_sample_depend_on_each_other():
    """A level that all lengths of a sample share leaves the slope alone; noise of their own does not."""

    def width(shared):
        low, high = decay_exponent(LENGTHS, noisy(16, 0, shared=shared)).interval
        return high - low

    assert width(1.0) < 1e-10 < 0.01 < width(0.0)


def test_precise_lengths_weigh_more():
    table = power_law(1.0, 1).repeat(40, 1)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    table[:, -2:] *= torch.exp(0.8 * noise) * 2  # the last two lengths are noisy and off the line
    fit = decay_exponent(LENGTHS, table)
    logs, x = table.mean(0).log(), torch.tensor(LENGTHS, dtype=torch.float64).log()
    unweighted = -((x - x.mean()) * logs).sum() / ((x - x.mean()) ** 2).sum()
    assert abs(fit.exponent - 1) < 0.8 * abs(float(unweighted) - 1)


def test_a_constant_has_exponent_zero_and_noise_about_it_explains_nothing():
    fit = decay_exponent(LENGTHS, noisy(64, 3, exponent=0.0, shared=0.0))
    assert fit.interval[0] < 0.0 < fit.interval[1]
    assert fit.r_squared < 0.7


def test_the_same_seed_gives_the_same_interval_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    first, again, other = (decay_exponent(LENGTHS, noisy(8, 0), seed=seed) for seed in (4, 4, 5))
    assert first.interval == again.interval != other.interval
    assert torch.equal(before, torch.get_rng_state())


def test_fewer_than_four_lengths_give_no_fit():
    assert decay_exponent(LENGTHS[:3], power_law(1.0)[:, :3]) is None


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_length_without_a_value_is_left_out_with_a_note(value):
    table = power_law(1.0, 3)
    table[1, 2] = value
    fit = decay_exponent(LENGTHS, table)
    assert fit.exponent == pytest.approx(1.0)
    assert fit.lengths == (8, 16, 64, 128, 256)
    assert fit.notes == ("T=32 left out: a sample is zero or undefined there",)


def test_warns_where_too_few_usable_lengths_remain():
    table = power_law(1.0)[:, :4]
    table[0, 0] = math.nan
    with pytest.warns(
        SensitivityWarning, match=r"no decay exponent: 3 usable lengths of 4, 4 are needed \(T=8 left out"
    ):
        assert decay_exponent(LENGTHS[:4], table) is None


@pytest.mark.parametrize(
    ("lengths", "values", "message"),
    [
        (LENGTHS, torch.ones(2, 5), r"values have shape \(2, 5\), .* needs \(sample, length\) = \(at least 1, 6\)"),
        (LENGTHS, torch.ones(6), r"values have shape \(6,\)"),
        ([8, 8, 16, 32], torch.ones(1, 4), r"lengths repeat: \[8, 8, 16, 32\]"),
        ([0, 8, 16, 32], torch.ones(1, 4), "lengths must be at least 1, not 0"),
        (
            [4, 8, 16, 32],
            [[1.0, 1.0, -2.0, 1.0]],
            r"sample 0 at T=16 is -2\.0: a sensitivity is finite",
        ),
        ([4, 8, 16, 32], [[1.0, 1.0, 1.0, math.inf]], "sample 0 at T=32 is inf"),
    ],
)
def test_refuses(lengths, values, message):
    with pytest.raises(InputError, match=message):
        decay_exponent(lengths, values)


def test_reads_well():
    assert str(Decay(1.0, (0.9, 1.1), 0.99, 0.0, (1, 2, 3, 4))) == "exponent 1.000 (95%: 0.900 to 1.100), R2 0.990"
    assert "one sample: no interval" in str(decay_exponent(LENGTHS, power_law(1.0)))
