"""A training that several processes share: the same sums as one process, and files from one of them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sensitivity.errors import InputError
from sensitivity.training import ranks

SMALL = ["--data", "synthetic:nodes=2,days=2", "--dim", "4", "--depth", "1", "--heads", "2", "--epochs", "2"]
SMALL += ["--lr", "0.002", "--batch-size", "64", "--dropout", "0", "--device", "cpu"]


def train(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "sensitivity.cli", "train", *SMALL, "--out", str(out), *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)


def test_two_processes_train_and_score_as_one(tmp_path: Path) -> None:
    for name, devices in (("one", "1"), ("two", "2")):
        done = train(tmp_path / name, "--devices", devices)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("this model") == 1  # one of the processes prints
    one, two = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two"))
    for step, errors in one["test"].items():
        assert two["test"][step] == pytest.approx(errors, rel=1e-4)
    logs = [list(csv.DictReader((tmp_path / name / "log.csv").open())) for name in ("one", "two")]
    for here, there in zip(*logs, strict=True):
        for column in ("train_mae", "validation_mae", "validation_rmse"):
            assert float(there[column]) == pytest.approx(float(here[column]), rel=1e-4)
    assert {path.name for path in (tmp_path / "two").iterdir()} == {path.name for path in (tmp_path / "one").iterdir()}


def test_without_other_processes_a_sum_is_the_value_itself() -> None:
    values = torch.ones(3)
    assert ranks.summed(values) is values
    assert ranks.world() == 1
    assert ranks.rank(1) == 0


def test_refuses_more_devices_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="devices=3 were asked for, but torch finds 1 of the kind 'cuda' here"):
        ranks.check_devices(torch.device("cuda"), 3)


def test_refuses_a_program_that_cannot_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    with pytest.raises(InputError, match="devices=2 starts this program again for the other processes, but"):
        ranks.check_devices(torch.device("cpu"), 2)
    ranks.check_devices(torch.device("cpu"), 1)
