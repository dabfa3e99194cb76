"""The synthetic city holds what it promises: rhythm, waves that travel, echoes, holes, and the same data again."""

import numpy as np
import pytest
import torch

from sensitivity import traffic
from sensitivity.errors import InputError
from sensitivity.traffic.graph import gaussian_kernel
from sensitivity.traffic.synthetic import WAVE_SPEED, road_network


def residuals(city):
    """Working days' speeds without their mean at each time of day."""
    rows = city.speed.double().numpy().reshape(-1, 288, city.speed.shape[1])
    weekday = city.day_of_week().numpy().reshape(-1, 288)[:, 0] < 4.5 / 7
    return (rows[weekday] - rows[weekday].mean(axis=0)).reshape(-1, city.speed.shape[1])


def explained(target, *features):
    """Share of the target's variance that a linear fit explains."""
    design = np.column_stack([*features, np.ones(len(target))])
    rest = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
    return 1 - rest.var() / target.var()


@pytest.fixture(scope="module")
def full():
    """No missing readings, four weeks."""
    return traffic.synthetic_city(nodes=16, days=28, seed=3, missing=0.0)


def test_same_arguments_same_data():
    one, two, other = (traffic.synthetic_city(6, 2, seed) for seed in (5, 5, 6))
    assert torch.equal(one.speed, two.speed)
    assert torch.equal(one.graph, two.graph)
    assert not torch.equal(one.speed, other.speed)


def test_shape_range_and_mask():
    city = traffic.synthetic_city()
    assert city.speed.shape == (14 * 288, 20)
    assert city.speed.dtype == torch.float32
    assert torch.equal(city.mask, city.speed != 0)
    valid = city.speed[city.mask]
    assert float(valid.min()) >= 3
    assert float(valid.max()) <= 70
    assert city.coordinates.shape == (20, 2)
    assert str(city.timestamps[0]).startswith("2012-03-01T00:00")


def test_missing_readings_come_at_the_asked_rate_in_bursts_and_alone():
    city = traffic.synthetic_city(days=28, missing=0.08)
    assert city.missing == pytest.approx(0.08, abs=0.01)
    hidden = np.pad(~city.mask.numpy(), ((1, 1), (0, 0))).astype(int)
    begin, stop = (np.argwhere((np.diff(hidden, axis=0) == sign).T)[:, 1] for sign in (1, -1))
    lengths = stop - begin
    assert (lengths == 1).mean() > 0.3
    assert lengths.max() > 24
    assert lengths[lengths > 3].sum() > 0.6 * lengths.sum()
    assert traffic.synthetic_city(days=2, missing=0.0).missing == 0


def test_daily_and_weekly_rhythm(full):
    speed = full.speed.numpy().mean(axis=1).reshape(-1, 288)
    weekday = full.day_of_week().numpy().reshape(-1, 288)[:, 0] < 4.5 / 7
    rush, night = [slice(96 - 6, 96 + 6), slice(210 - 6, 210 + 6)], slice(24, 48)
    for hour in rush:
        assert speed[weekday][:, hour].mean() < speed[weekday][:, night].mean() - 5
        assert speed[weekday][:, hour].mean() < speed[~weekday][:, hour].mean() - 5


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_waves_travel_backwards_with_the_stated_delay(full, hops):
    network, rest = road_network(16, seed=3), residuals(full)
    for road in network.roads:
        ahead, behind = road[-1], road[-1 - hops]
        delay = network.distances[behind, ahead] / WAVE_SPEED * 12
        lagged = [np.corrcoef(rest[: len(rest) - lag, ahead], rest[lag:, behind])[0, 1] for lag in range(20)]
        assert abs(int(np.argmax(lagged)) - delay) <= 1
        assert max(lagged) > lagged[0] + 0.03
        reverse = [np.corrcoef(rest[lag:, ahead], rest[: len(rest) - lag, behind])[0, 1] for lag in range(1, 20)]
        assert max(lagged) > max(reverse) + 0.03


def test_the_delayed_neighbour_predicts_beyond_the_own_past(full):
    network, rest = road_network(16, seed=3), residuals(full)
    road = network.roads[0]
    ahead, behind = road[-1], road[-3]
    lag = round(network.distances[behind, ahead] / WAVE_SPEED * 12)
    now = rest[40:, behind]
    own = [rest[40 - k : len(rest) - k, behind] for k in range(lag, lag + 6)]
    other = network.roads[1][0]
    neighbour, stranger = ([rest[40 - k : len(rest) - k, node] for k in range(lag, lag + 3)] for node in (ahead, other))
    gain = explained(now, *own, *neighbour) - explained(now, *own)
    assert gain > 0.03
    assert gain > 10 * (explained(now, *own, *stranger) - explained(now, *own))


def test_the_echo_is_a_long_lag_in_the_own_past():
    def gain(echo):
        rest = residuals(traffic.synthetic_city(8, 28, seed=2, missing=0.0, echo=echo))
        total = 0.0
        for node in range(8):
            now, past = rest[40:, node], [rest[40 - k : len(rest) - k, node] for k in range(1, 13)]
            far = [rest[40 - k : len(rest) - k, node] for k in (23, 24, 25)]
            total += explained(now, *past, *far) - explained(now, *past)
        return total / 8

    assert gain(120) > 3 * gain(0)
    assert gain(120) > 0.002


def test_graph_is_the_kernel_of_directed_distances():
    city, network = traffic.synthetic_city(12, 1, seed=7), road_network(12, seed=7)
    graph = city.graph.numpy()
    listed = np.where(network.distances <= 6.0, network.distances, np.inf)
    std = listed[np.isfinite(listed)].std()
    for i, j in [(0, 0), (0, 1), (1, 0), (0, 5), (11, 3)]:
        weight = np.exp(-((listed[i, j] / std) ** 2))
        assert graph[i, j] == pytest.approx(weight if weight >= 0.1 else 0)
    assert (np.diag(graph) == 1).all()
    assert not np.array_equal(graph, graph.T)


def test_shortest_ways_obey_the_triangle_and_reach_the_other_road():
    network = road_network(20, seed=0)
    d = network.distances
    assert (d[:, None, :] <= d[:, :, None] + d[None] + 1e-9).all()
    assert sorted(node for road in network.roads for node in road) == list(range(20))
    assert np.isfinite(d[network.roads[1][0], network.roads[0]]).any()


def test_gaussian_kernel_by_hand():
    distances = np.array([[0.0, 1.0], [np.inf, 0.0]])
    std = np.std([0.0, 1.0, 0.0])
    np.testing.assert_allclose(gaussian_kernel(distances, 0.0), [[1, np.exp(-((1 / std) ** 2))], [0, 1]], rtol=1e-6)
    assert gaussian_kernel(distances, 0.1)[0, 1] == 0  # exp(-4.5) = 0.011 is below the threshold
    assert gaussian_kernel(np.zeros((1, 1))).tolist() == [[1.0]]


@pytest.mark.parametrize("arguments", [{"nodes": 1, "days": 1}, {"nodes": 9, "days": 1, "step": 15, "incidents": 0.0}])
def test_small_cities(arguments):
    city = traffic.synthetic_city(**arguments)
    assert city.speed.shape == (1440 // arguments.get("step", 5), arguments["nodes"])
    assert torch.isfinite(city.speed).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0}, "nodes of the synthetic city must be an integer of at least 1, not 0"),
        ({"days": True}, "days of the synthetic city must be an integer of at least 1, not True"),
        ({"seed": -1}, "seed of the synthetic city must be an integer of at least 0, not -1"),
        ({"step": 7}, "step must divide a day's 1440 minutes, but 7 does not"),
        ({"missing": 1.0}, r"missing must be a share in \[0, 1\), not 1.0"),
        ({"noise": float("nan")}, "noise of the synthetic city must be finite and at least 0, not nan"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(InputError, match=message):
        traffic.synthetic_city(**arguments)
