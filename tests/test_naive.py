"""Naive forecasts: published scores on real data, and a slow independent computation."""

import dataclasses

import numpy as np
import pytest
import torch

from sensitivity import traffic
from sensitivity.models import naive
from sensitivity.training.metrics import score

KNOWN = {
    "last value": ((3.835, 8.19, 8.80), (4.800, 10.46, 11.29), (6.352, 13.37, 15.32)),
    "last non-zero value": ((3.360, 5.99, 8.03), (3.985, 7.47, 9.99), (5.053, 9.62, 13.25)),
    "historical average": ((3.70, 6.71, 10.41),) * 3,
}
"""MAE, RMSE, MAPE at 15, 30, 60 minutes on ten sensors of METR-LA, ``dcrnn`` test windows."""


@pytest.fixture(scope="module")
def city():
    return traffic.synthetic_city(nodes=3, days=10, seed=1, missing=0.3)


@pytest.mark.parametrize("name", KNOWN)
def test_known_scores_on_metr_la(metr_la, name):
    cut = traffic.split(traffic.read(metr_la / "metr-la-10.h5"))
    scores = score(naive.forecasts(cut)[name], cut.test)
    for step, (mae, rmse, mape) in zip(("3", "6", "12"), KNOWN[name], strict=True):
        digits = 5e-4 if name != "historical average" else 5e-3
        assert scores[step]["mae"] == pytest.approx(mae, abs=digits)
        assert scores[step]["rmse"] == pytest.approx(rmse, abs=0.015)  # the last digit may differ by one
        assert scores[step]["mape"] == pytest.approx(mape, abs=0.015)


def test_last_values_by_a_slow_loop(city):
    part = traffic.split(city).test
    last, nonzero = naive.last_value(part), naive.last_nonzero(part)
    speed = city.speed.numpy()
    far = 0
    for window in range(0, len(part), 7):
        row = part.first + window + 11
        for node in range(3):
            back = row
            while speed[back, node] == 0:
                back -= 1
            far = max(far, row - back)
            assert (last[window, :, node] == speed[row, node]).all()
            assert (nonzero[window, :, node] == speed[back, node]).all()
    assert far > 12  # some last readings lie before the window
    assert last.shape == nonzero.shape == (len(part), 12, 3)


def test_never_a_reading_gives_zero(city):
    speed, mask = city.speed.clone(), city.mask.clone()
    speed[:, 1], mask[:, 1] = 0, False
    part = traffic.split(dataclasses.replace(city, speed=speed, mask=mask)).test
    assert (naive.last_nonzero(part)[..., 1] == 0).all()


@pytest.mark.parametrize("protocol", ["dcrnn", "paper"])
def test_historical_average_by_groups(city, protocol):
    cut = traffic.split(city, protocol)
    speed = city.speed.numpy().astype(np.float64)
    slot = np.arange(len(speed)) % (7 * 288)
    forecast = naive.historical_average(cut)
    for window in (0, 100, len(cut.test) - 1):
        for ahead in (1, 12):
            row = cut.test.first + window + 11 + ahead
            same = (slot == slot[row]) & (np.arange(len(speed)) < cut.test.first)
            for node in range(3):
                readings = speed[same, node][speed[same, node] != 0]
                if len(readings) == 0:
                    known = speed[: cut.test.first, node]
                    readings = known[known != 0]
                assert float(forecast[window, ahead - 1, node]) == pytest.approx(readings.mean(), rel=1e-6)


def test_historical_average_never_sees_the_test_part(city):
    cut = traffic.split(city)
    speed, mask = city.speed.clone(), city.mask.clone()
    speed[cut.test.first :], mask[cut.test.first :] = 1.0, True
    other = traffic.split(dataclasses.replace(city, speed=speed, mask=mask))
    assert torch.equal(naive.historical_average(other), naive.historical_average(cut))
    assert naive.historical_average(cut, cut.validation).shape == (len(cut.validation), 12, 3)


def test_a_sensor_without_any_reading_takes_the_citys_mean(city):
    speed, mask = city.speed.clone(), city.mask.clone()
    speed[:, 1], mask[:, 1] = 0, False
    cut = traffic.split(dataclasses.replace(city, speed=speed, mask=mask))
    rows = cut.test.first
    expected = speed[:rows][mask[:rows]].double().mean()
    torch.testing.assert_close(naive.historical_average(cut)[..., 1].double().mean(), expected, rtol=1e-6, atol=0)
