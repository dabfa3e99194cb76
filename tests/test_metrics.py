"""The masked metric: NumPy's numbers, whatever the batches; and the loss."""

import json
import warnings

import numpy as np
import pytest
import torch

from sensitivity.errors import InputError, RunError, SensitivityWarning
from sensitivity.training.metrics import MaskedMetrics, masked_mae


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    target = rng.uniform(0.2, 70, size=(50, 12, 4))
    mask = rng.random(target.shape) > 0.3
    prediction = target + rng.normal(0, 5, size=target.shape)
    return tuple(torch.from_numpy(array) for array in (prediction, np.where(mask, target, 0), mask))


def by_numpy(prediction, target, mask, floor=1.0):
    p, y = prediction.numpy()[mask.numpy()], target.numpy()[mask.numpy()]
    rated = y >= floor
    return {
        "mae": np.mean(np.abs(p - y)),
        "rmse": np.sqrt(np.mean((p - y) ** 2)),
        "mape": 100 * np.mean(np.abs(p - y)[rated] / y[rated]),
    }


def scored(case, size, **options):
    metrics = MaskedMetrics(**options)
    for parts in zip(*(part.split(size) for part in case), strict=True):
        metrics.update(*parts)
    return metrics


@pytest.mark.parametrize("size", [1, 7, 50])
def test_equals_numpy_at_any_batch_size(case, size):
    scores = scored(case, size).compute()
    assert list(scores) == ["3", "6", "12", "average"]
    for name, part in scores.items():
        chosen = slice(None) if name == "average" else slice(int(name) - 1, int(name))
        expected = by_numpy(*(tensor[:, chosen] for tensor in case))
        for metric, value in part.items():
            assert value == pytest.approx(expected[metric], rel=1e-12)


def test_mean_of_batch_means_would_differ(case):
    prediction, target, mask = case
    mask = mask.clone()
    mask[1:20] = False
    mask[0, :, :2] = False
    per_batch = np.mean(
        [by_numpy(prediction[i : i + 10], target[i : i + 10], mask[i : i + 10])["mae"] for i in (0, 20)]
    )
    pooled = scored((prediction[:30], target[:30], mask[:30]), 10).compute()["average"]["mae"]
    assert abs(per_batch - pooled) > 1e-3


def test_float32_batches_are_summed_in_float64():
    target = torch.full((64, 1, 4096), 60.0)
    metrics = MaskedMetrics(horizons=(1,))
    metrics.update(target + 1e-2, target, target > 0)
    single = float((target + 1e-2)[0, 0, 0].double() - 60)
    assert metrics.compute()["1"]["mae"] == pytest.approx(single, rel=1e-12)


def test_masked_entries_never_count(case):
    prediction, target, mask = case
    junk = torch.where(mask, target, float("nan"))
    wild = torch.where(mask, prediction, float("inf"))
    assert scored((wild, junk, mask), 50).compute() == scored(case, 50).compute()


def test_floor_of_mape_and_dropped_entries(case):
    low = int((case[2] & (case[1] < 10)).sum())
    metrics = scored(case, 50, floor=10)
    assert metrics.dropped == low > 0
    assert metrics.count == int(case[2].sum())
    assert metrics.compute()["average"]["mape"] == pytest.approx(by_numpy(*case, floor=10)["mape"], rel=1e-12)
    with pytest.raises(InputError, match="floor of MAPE must be above 0 mph, not 0"):
        MaskedMetrics(floor=0)


def test_short_horizon_and_single_window(case):
    prediction, target, mask = (part[0, :6] for part in case)
    metrics = MaskedMetrics()
    metrics.update(prediction, target, mask)
    assert list(metrics.compute()) == ["3", "6", "average"]


def test_merge_is_one_pass(case):
    one, two = scored([part[:20] for part in case], 20), scored([part[20:] for part in case], 30)
    one.merge(two)
    one.merge(MaskedMetrics())
    whole = scored(case, 50).compute()
    assert one.compute()["12"]["rmse"] == pytest.approx(whole["12"]["rmse"], rel=1e-12)
    with pytest.raises(InputError, match="floors of 1 and 2 mph cannot be merged"):
        one.merge(MaskedMetrics(floor=2))


def test_all_missing_is_said_clearly(case):
    prediction, target, mask = case
    for metrics in (MaskedMetrics(), scored((prediction, target, mask & False), 50)):
        with pytest.raises(RunError, match="there is no valid target to score"):
            metrics.compute()
    partly = mask.clone()
    partly[:, 5] = False
    with pytest.warns(SensitivityWarning, match="no valid target at horizon 6: its scores are None"):
        scores = scored((prediction, target, partly), 50).compute()
    assert scores["6"] == {"mae": None, "rmse": None, "mape": None}
    assert "NaN" not in json.dumps(scores)


def test_diverged_predictions_and_shapes(case):
    prediction, target, mask = case
    bad = torch.where(mask, float("nan"), prediction)
    with pytest.raises(RunError, match=f"{int(mask.sum())} of {int(mask.sum())} scored predictions are not finite"):
        scored((bad, target, mask), 50)
    metrics = scored(case, 50)
    with pytest.raises(InputError, match="this batch has 6 horizon steps, the batches before it had 12"):
        metrics.update(prediction[:, :6], target[:, :6], mask[:, :6])
    for call in (metrics.update, masked_mae):
        with pytest.raises(InputError, match=r"must be of one shape \(\.\.\., horizon, node\)"):
            call(prediction[:, :1], target, mask)


def test_loss_and_its_gradient(case):
    prediction, target, mask = case
    prediction.requires_grad_()
    loss = masked_mae(prediction, torch.where(mask, target, float("nan")), mask)
    assert float(loss.detach()) == pytest.approx(by_numpy(prediction.detach(), target, mask)["mae"], rel=1e-12)
    loss.backward()
    expected = torch.where(mask, (prediction - target).sign() / mask.sum(), 0.0)
    torch.testing.assert_close(prediction.grad, expected.detach())


def test_an_all_missing_batch_has_zero_loss_with_a_graph(case):
    prediction, target, mask = case
    prediction.requires_grad_()
    with pytest.warns(SensitivityWarning, match="a batch has no valid target: its loss is 0"):
        loss = masked_mae(prediction, target, mask & False)
    loss.backward()
    assert float(loss.detach()) == 0
    assert (prediction.grad == 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masked_mae(prediction, target, mask)
