"""The synthetic city: a seeded generator of traffic that runs everything without a download.

What is in it, so that it can be found: two rush hours on working days and a flat weekend; incidents, more of them in
the rush, whose congestion spreads against the direction of driving at about ten miles an hour, as queues on real
freeways do, and enters the roads that feed into the queue; a weaker second wave a fixed time after the first, when the
lanes reopen; measurement noise; missing readings, as zeros, in bursts and alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sensitivity.errors import InputError
from sensitivity.traffic.data import Traffic, assemble
from sensitivity.traffic.graph import gaussian_kernel

SENSORS_PER_ROAD = 8
WIDTH = 20.0
"""Miles across the city."""
LISTED = 6.0
"""Road distances up to this many miles are listed; longer ones count as infinite in the graph."""
WAVE_SPEED = 10.0
"""Miles per hour at which congestion spreads against the direction of driving."""
REACH = 8.0
"""Miles over which a wave falls to 1/e."""


@dataclass(frozen=True)
class RoadNetwork:
    """Freeways of one direction each, which merge into one another.

    Attributes:
        coordinates: ``(node, 2)`` miles east and north.
        distances: ``(node, node)`` driving miles from row to column; infinite where no road leads.
        roads: the sensors of every road, in the direction of driving.
    """

    coordinates: np.ndarray
    distances: np.ndarray
    roads: list[list[int]]


def synthetic_city(
    nodes: int = 20,
    days: int = 14,
    seed: int = 0,
    *,
    step: int = 5,
    missing: float | int = 0.08,
    noise: float | int = 1.5,
    incidents: float | int = 6.0,
    echo: int = 45,
) -> Traffic:
    """A city's traffic: the same arguments give the same data.

    Args:
        nodes: number of sensors.
        days: length; the first day is Thursday, 2012-03-01.
        seed: of the generator's own random streams.
        step: minutes between readings, a divisor of a day.
        missing: expected share of missing readings, four fifths of them in bursts of about an hour.
        noise: standard deviation of the measurement, mph.
        incidents: expected number on each road and working day.
        echo: minutes after which an incident's second, weaker wave starts.

    Returns:
        traffic with graph and coordinates; ``.source`` names every argument.

    Raises:
        InputError: an argument out of its range.
    """
    arguments = {
        "nodes": nodes, "days": days, "seed": seed, "step": step,
        "missing": missing, "noise": noise, "incidents": incidents, "echo": echo,
    }  # fmt: skip
    _check(arguments)
    rows = days * 1440 // step
    times = np.datetime64("2012-03-01", "ns") + np.arange(rows) * np.timedelta64(step, "m")
    network = road_network(nodes, seed)
    streams = [np.random.default_rng([seed, part]) for part in (1, 2, 3)]
    demand = rhythm(times)
    jam = congestion(network, demand, streams[0], step, incidents, echo)
    speed = _speeds(network, demand, jam, noise, streams[1])
    speed[_holes(rows, nodes, missing, step, streams[2])] = 0.0
    return assemble(
        speed,
        times,
        [f"city-{node:03d}" for node in range(nodes)],
        f"synthetic({', '.join(f'{name}={value}' for name, value in arguments.items())})",
        name="synthetic city",
        graph=torch.from_numpy(_weights(network.distances)),
        coordinates=torch.from_numpy(network.coordinates.astype(np.float32)),
        origin={"kind": "synthetic", "arguments": arguments, "mean": float(speed.mean())},
    )


def _check(arguments: dict[str, Any]) -> None:
    """Refuses arguments out of their range."""
    for name, low in (("nodes", 1), ("days", 1), ("seed", 0), ("step", 1), ("echo", 0)):
        value = arguments[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InputError(f"{name} of the synthetic city must be an integer of at least {low}, not {value!r}.")
    if 1440 % arguments["step"]:
        raise InputError(f"step must divide a day's 1440 minutes, but {arguments['step']} does not.")
    if not 0 <= arguments["missing"] < 1:
        raise InputError(f"missing must be a share in [0, 1), not {arguments['missing']!r}.")
    for name in ("noise", "incidents"):
        if not 0 <= arguments[name] < math.inf:
            raise InputError(f"{name} of the synthetic city must be finite and at least 0, not {arguments[name]!r}.")


def road_network(nodes: int, seed: int = 0) -> RoadNetwork:
    """Roads of about eight sensors, 1.2 to 2 miles apart; every road but the first ends in the nearest other road."""
    rng = np.random.default_rng([seed, 0])
    roads = [list(map(int, part)) for part in np.array_split(np.arange(nodes), math.ceil(nodes / SENSORS_PER_ROAD))]
    coordinates = np.zeros((nodes, 2))
    direct = np.full((nodes, nodes), np.inf)
    np.fill_diagonal(direct, 0.0)
    for road in roads:
        gaps = rng.uniform(1.2, 2.0, size=len(road))
        heading = rng.uniform(0, 2 * np.pi) + np.cumsum(rng.normal(0, 0.15, size=len(road)))
        path = np.cumsum(gaps[:, None] * np.stack([np.cos(heading), np.sin(heading)], axis=1), axis=0)
        coordinates[road] = path - path.mean(axis=0) + rng.uniform(-WIDTH / 4, WIDTH / 4, size=2)
        direct[road[:-1], road[1:]] = gaps[1:]
    for number, road in enumerate(roads[1:], start=1):
        others = np.concatenate(roads[:number])
        apart = np.linalg.norm(coordinates[others] - coordinates[road[-1]], axis=1)
        direct[road[-1], others[apart.argmin()]] = max(1.2, float(apart.min()))
    return RoadNetwork(coordinates, _shortest(direct), roads)


def _shortest(direct: np.ndarray) -> np.ndarray:
    """All shortest ways (Floyd and Warshall)."""
    distances = direct.copy()
    for middle in range(len(distances)):
        np.minimum(distances, distances[:, middle, None] + distances[None, middle, :], out=distances)
    return distances


def _weights(distances: np.ndarray) -> np.ndarray:
    """The graph: a Gaussian kernel of the listed distances."""
    return gaussian_kernel(np.where(distances <= LISTED, distances, np.inf))


def rhythm(times: np.ndarray) -> np.ndarray:
    """Demand ``(time, 2)`` in [0, 1] of a morning and of an evening road: rush hours, and a hump at the weekend."""
    hour = (times - times.astype("datetime64[D]")) / np.timedelta64(1, "h")
    weekday = ((times.astype("datetime64[D]").astype(np.int64) + 3) % 7) < 5

    def peak(centre: float, width: float) -> np.ndarray:
        return np.exp(-0.5 * ((hour - centre) / width) ** 2)

    morning, evening, noon = peak(8.0, 1.2), peak(17.5, 1.6), 0.3 * peak(13.5, 3.0)
    working = np.stack([morning + 0.5 * evening, 0.5 * morning + evening], axis=1) + noon[:, None]
    return np.where(weekday[:, None], working, noon[:, None]).clip(0, 1)


def congestion(
    network: RoadNetwork, demand: np.ndarray, rng: np.random.Generator, step: int, incidents: float | int, echo: int
) -> np.ndarray:
    """Congestion ``(time, node)`` >= 0: every incident's wave, and its echo, arrives after distance / wave speed.

    An incident at sensor o and time s reaches sensor i at s + d(i, o) / WAVE_SPEED with its severity times
    exp(-d(i, o) / REACH), where d(i, o) is the driving distance from i to o: queues grow backwards.
    """
    rows, nodes = len(demand), len(network.distances)
    rate = demand.mean(axis=1) + 0.05
    expected = incidents * len(network.roads) * rows * step / 1440
    count = int(rng.poisson(expected))
    when = rng.choice(rows, size=count, p=rate / rate.sum())
    where = rng.integers(nodes, size=count)
    severity = rng.gamma(4.0, 0.3, size=count)
    distances = network.distances[:, where].T  # (incident, node)
    strength = severity[:, None] * np.exp(-distances / REACH)
    later = np.where(np.isfinite(distances), distances, 0.0) / WAVE_SPEED * 60 / step
    impulses = np.zeros((rows, nodes))
    for delay, share in ((0.0, 1.0), (echo / step, 0.6)):
        arrival = when[:, None] + np.rint(later + delay).astype(np.int64)
        incident, node = np.nonzero((strength > 0.02) & (arrival < rows))
        np.add.at(impulses, (arrival[incident, node], node), share * strength[incident, node])
    return _spread(impulses, step)


def _spread(impulses: np.ndarray, step: int) -> np.ndarray:
    """Every impulse becomes a queue that grows within ten minutes and dissolves over half an hour."""
    minutes = np.arange(0, 180, step)
    pulse = np.exp(-minutes / 25.0) - np.exp(-(minutes + step) / 5.0)
    pulse = pulse.clip(0) / pulse.max()
    size = 1 << (len(impulses) + len(pulse)).bit_length()  # a power of two keeps the transform fast
    spectrum = np.fft.rfft(impulses, size, axis=0) * np.fft.rfft(pulse, size)[:, None]
    return np.fft.irfft(spectrum, size, axis=0)[: len(impulses)].clip(0)


def _speeds(
    network: RoadNetwork, demand: np.ndarray, jam: np.ndarray, noise: float | int, rng: np.random.Generator
) -> np.ndarray:
    """Speeds in mph: free flow, slowed by demand and by congestion, then measured."""
    rows, nodes = jam.shape
    free = rng.uniform(60, 68, size=nodes)
    depth = rng.uniform(0.08, 0.28, size=nodes)
    side = np.zeros((nodes, 2))
    for road in network.roads:
        morning = rng.random()
        side[road] = morning, 1 - morning
    flow = free * (1 - depth * (demand @ side.T)) * (0.12 + 0.88 * np.exp(-jam))
    return (flow + noise * rng.standard_normal((rows, nodes))).clip(3, 70)


def _holes(rows: int, nodes: int, missing: float | int, step: int, rng: np.random.Generator) -> np.ndarray:
    """True where a reading is missing: bursts of about an hour, and single ones."""
    length = max(2.0, 60 / step)
    covered = -math.log1p(-0.8 * missing)  # bursts overlap
    starts = rng.random((rows, nodes)) < min(1.0, covered / length)
    begin, node = np.nonzero(starts)
    stop = np.minimum(begin + rng.geometric(1 / length, size=len(begin)), rows)
    change = np.zeros((rows + 1, nodes), dtype=np.int64)
    np.add.at(change, (begin, node), 1)
    np.add.at(change, (stop, node), -1)
    single = 0.2 * missing / (1 - 0.8 * missing)
    return (change.cumsum(axis=0)[:rows] > 0) | (rng.random((rows, nodes)) < single)
