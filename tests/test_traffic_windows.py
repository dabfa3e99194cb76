"""Splits, windows, scaler and sequences: counts, borders, and what must never be seen."""

import dataclasses

import numpy as np
import pytest
import torch

from sensitivity import traffic
from sensitivity.errors import InputError
from sensitivity.traffic.scaler import FLOOR


@pytest.fixture(scope="module")
def city():
    return traffic.synthetic_city(nodes=5, days=3, seed=1)


def changed(data, rows, value=33.0):
    """The same traffic with other readings in some rows."""
    speed, mask = data.speed.clone(), data.mask.clone()
    speed[rows], mask[rows] = value, True
    return dataclasses.replace(data, speed=speed, mask=mask)


@pytest.mark.parametrize(
    ("protocol", "counts", "firsts"),
    [("dcrnn", (23974, 3425, 6850), (0, 23974, 27399)), ("paper", (23967, 3404, 6831), (0, 23990, 27417))],
)
def test_metr_la_counts_and_borders(metr_la, protocol, counts, firsts):
    data = traffic.read(metr_la / "metr-la-10.h5")
    cut = traffic.split(data, protocol)
    parts = (cut.train, cut.validation, cut.test)
    assert tuple(len(part) for part in parts) == counts
    for part, first in zip(parts, firsts, strict=True):
        for index, start in ((0, first), (len(part) - 1, first + len(part) - 1)):
            window = part[index]
            assert torch.equal(window.target, data.speed[start + 12 : start + 24])
            assert torch.equal(window.mask, data.mask[start + 12 : start + 24])
            assert torch.equal(window.inputs[..., 1], data.time_of_day()[start : start + 12, None].expand(12, 10))
    used = cut.test.first + len(cut.test) + 23
    assert used == {"dcrnn": 34272, "paper": 34271}[protocol]  # paper: the last row is unused


def test_borders_written_out():
    assert traffic.borders(34272, "dcrnn") == ((0, 23974), (23974, 3425), (27399, 6850), 23985)
    assert traffic.borders(34272, "paper") == ((0, 23967), (23990, 3404), (27417, 6831), 23990)
    assert traffic.borders(103, "dcrnn", 2, 2) == ((0, 70), (70, 10), (80, 20), 71)


def test_a_window_is_a_view_and_holds_raw_targets(city):
    cut = traffic.split(city)
    window = cut.train[7]
    assert window.inputs.shape == (12, 5, 2)
    assert window.target.shape == window.mask.shape == (12, 5)
    assert window.inputs.untyped_storage().data_ptr() == cut.test.table.untyped_storage().data_ptr()
    assert window.target.untyped_storage().data_ptr() == city.speed.untyped_storage().data_ptr()
    expected = (city.speed[7:19] - cut.scaler.mean) / cut.scaler.std
    assert torch.equal(window.inputs[..., 0], expected)


def test_batch_equals_single_windows(city):
    part = traffic.split(city, day_of_week=True).validation
    order = [3, 0, len(part) - 1]
    for got, expected in zip(part.batch(order), zip(*(part[i] for i in order), strict=True), strict=True):
        assert torch.equal(got, torch.stack(expected))
    assert part.batch(torch.tensor(order)).inputs.shape == (3, 12, 5, 3)


def test_batches_cover_every_window_once(city, generator):
    part = traffic.split(city).validation
    plain = torch.cat([window.target for window in part.batches(7)])
    assert torch.equal(plain, part.batch(range(len(part))).target)
    mixed = torch.cat([window.target for window in part.batches(7, generator)])
    assert not torch.equal(mixed, plain)
    assert torch.equal(mixed.flatten(1).sort(dim=0).values, plain.flatten(1).sort(dim=0).values)
    again = torch.cat([window.target for window in part.batches(7, torch.Generator().manual_seed(0))])
    assert torch.equal(mixed, again)


def test_indices_beyond_the_end(city):
    part = traffic.split(city).test
    assert torch.equal(part[-1].target, part[len(part) - 1].target)
    assert len(list(part)) == len(part)
    with pytest.raises(IndexError, match=f"window {len(part)} of {len(part)}"):
        part[len(part)]
    with pytest.raises(IndexError, match="must lie in 0"):
        part.batch([0, -1])


def test_time_of_day_and_week(city):
    assert float(city.time_of_day()[0]) == 0
    assert float(city.time_of_day()[287]) == pytest.approx(287 / 288)
    assert float(city.day_of_week()[0]) == pytest.approx(3 / 7)  # 2012-03-01 was a Thursday
    assert city.steps_per_day == 288


def test_scaler_is_the_valid_training_rows_mean_and_std(city):
    cut = traffic.split(city)
    rows = len(cut.train) + 11
    valid = city.speed.numpy().astype(np.float64)[:rows][city.mask.numpy()[:rows]]
    assert float(cut.scaler.mean) == pytest.approx(valid.mean(), rel=1e-6)
    assert float(cut.scaler.std) == pytest.approx(valid.std(), rel=1e-6)


def test_paper_scaler_is_per_sensor_with_zeros(city):
    scaler = traffic.split(city, "paper").scaler
    block = city.speed.numpy().astype(np.float64)[: int(0.7 * 864)]
    np.testing.assert_allclose(scaler.mean.numpy(), block.mean(0), rtol=1e-6)
    np.testing.assert_allclose(scaler.std.numpy(), block.std(0), rtol=1e-6)
    quirk = traffic.split(city, "dcrnn", zeros=True).scaler
    assert float(quirk.mean) < float(traffic.split(city).scaler.mean)


@pytest.mark.parametrize("protocol", ["dcrnn", "paper"])
def test_scaler_never_sees_a_later_target(city, protocol):
    cut = traffic.split(city, protocol)
    first_target = cut.validation.first + 12
    other = traffic.split(changed(city, slice(first_target, None)), protocol).scaler
    assert torch.equal(other.mean, cut.scaler.mean)
    assert torch.equal(other.std, cut.scaler.std)
    last_fitted = traffic.borders(864, protocol).fitted - 1
    assert last_fitted < first_target
    seen = traffic.split(changed(city, last_fitted), protocol).scaler
    assert not torch.equal(seen.mean, cut.scaler.mean)


def test_dead_sensors_have_a_floor_and_borrow_the_mean():
    speed = torch.full((10, 3), 40.0)
    speed[:5, 0] = 60
    speed[:, 2] = 0
    scaler = traffic.Scaler.fit(speed, speed != 0, per_sensor=True)
    assert float(scaler.std[1]) == FLOOR
    assert float(scaler.mean[2]) == pytest.approx(45)
    assert torch.isfinite(scaler.transform(speed)).all()
    with pytest.raises(InputError, match="none of the 10 training rows has a valid reading"):
        traffic.Scaler.fit(speed * 0, speed < 0)


def test_scaler_inverts_and_survives_as_plain_values(city):
    for protocol in ("dcrnn", "paper"):
        scaler = traffic.split(city, protocol).scaler
        torch.testing.assert_close(scaler.inverse(scaler.transform(city.speed)), city.speed)
        back = traffic.Scaler.from_state(scaler.state())
        assert torch.equal(back.mean, scaler.mean)
        assert torch.equal(back.std, scaler.std)
        assert back.zeros == scaler.zeros
    with pytest.raises(InputError, match=r"\['std'\] are absent"):
        traffic.Scaler.from_state({"mean": 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"protocol": "dcnn"}, "unknown protocol 'dcnn'; choose one of dcrnn, paper"),
        ({"input_length": 0}, "input_length must be an integer of at least 1, not 0"),
        ({"horizon": True}, "horizon must be an integer of at least 1, not True"),
        ({"input_length": 900}, "864 rows are too few for the 'dcrnn' split"),
        ({"protocol": "paper", "input_length": 80}, "the validation part would hold no window of 80 \\+ 12"),
    ],
)
def test_splits_that_cannot_be(city, arguments, message):
    with pytest.raises(InputError, match=message):
        traffic.split(city, **arguments)


def test_sequences_share_their_ends_across_lengths(city):
    scaler = traffic.split(city).scaler
    longest = traffic.sequences(city, scaler, 300, 6, seed=4)
    table = traffic.inputs(city, scaler)
    ends = traffic.end_rows(city, 6, seed=4)
    assert longest.shape == (6, 300, 5, 2)
    for sample, end in enumerate(ends.tolist()):
        assert torch.equal(longest[sample], table[end - 299 : end + 1])
    for length in (1, 12, 48):
        assert torch.equal(traffic.sequences(city, scaler, length, 6, seed=4), longest[:, -length:])
    assert not torch.equal(traffic.end_rows(city, 6, seed=5), ends)
    first, count = traffic.borders(864).test
    assert first + 11 <= int(ends.min()) <= int(ends.max()) < first + count + 11


def test_sequences_with_longest_fit_every_length(city):
    scaler = traffic.split(city).scaler
    short, long = (traffic.sequences(city, scaler, n, 20, part="train", longest=400) for n in (12, 400))
    assert torch.equal(short, long[:, -12:])
    whole = traffic.sequences(city, scaler, 864, 1, part="all", longest=864)
    assert torch.equal(whole[0], traffic.inputs(city, scaler))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 865}, "length 865 is longer than the data, which has 864 rows"),
        ({"length": 0}, "length must be an integer of at least 1, not 0"),
        ({"samples": 0}, "samples must be an integer of at least 1, not 0"),
        ({"part": "tst"}, "unknown part 'tst'; choose one of train, validation, test, all"),
        ({"samples": 5000}, "only 168 end times in the test part"),
        ({"length": 300, "part": "train", "samples": 50}, "reaches back before the first row for .* pass longest=300"),
        ({"length": 24, "longest": 12}, "length 24 exceeds longest=12"),
        ({"longest": 900}, "length 900 is longer than the data"),
    ],
)
def test_sequences_that_cannot_be(city, arguments, message):
    arguments = {"length": 12, "samples": 4} | arguments
    with pytest.raises(InputError, match=message):
        traffic.sequences(city, traffic.split(city).scaler, **arguments)


def test_scaler_of_other_sensors(city):
    scaler = traffic.split(traffic.synthetic_city(4, 3), "paper").scaler
    with pytest.raises(InputError, match="fitted on 4 sensors, but the data has 5"):
        traffic.sequences(city, scaler, 12, 2)


def test_split_moves_together(city):
    cut = traffic.split(city)
    moved = cut.to("cpu")
    assert moved.test.table is moved.train.table
    assert torch.equal(moved.test[3].inputs, cut.test[3].inputs)
    assert moved.validation.first == cut.validation.first


@pytest.mark.parametrize(("part", "rows"), [("train", (0, 615)), ("validation", (595, 705)), ("test", (680, 864))])
def test_a_part_without_a_valid_target(city, part, rows):
    mask = city.mask.clone()
    mask[slice(*rows)] = False
    with pytest.raises(InputError, match=rf"no valid reading from 2012-03-0.* of the {part} part of the 'dcrnn' split"):
        traffic.split(dataclasses.replace(city, mask=mask))
