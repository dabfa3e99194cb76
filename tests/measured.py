"""Small models on a small city, the command that measures them, and what a refusal looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result

from sensitivity import checkpoint
from sensitivity.cli import commands
from sensitivity.models import Forecaster
from sensitivity.traffic import describe, split, synthetic_city

CITY = {"nodes": 3, "days": 3, "seed": 1}


def run(*args: str) -> Result:
    return CliRunner().invoke(commands, ["measure", *args], prog_name="sensitivity")


def forecaster(seed: int = 0, **options: Any) -> Forecaster:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Forecaster(**({"nodes": 3, "dim": 8, "depth": 2, "heads": 2} | options)).eval()


def refused(result: Result, text: str) -> None:
    """One sentence on standard error, exit 2, nothing on standard output."""
    assert result.exit_code == 2, result.output
    assert text in result.stderr
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def kept(path: Path) -> Path:
    """A checkpoint of such a model."""
    traffic = synthetic_city(**CITY)
    data = describe(traffic) | {"protocol": "dcrnn", "input_length": 12, "horizon": 12}
    checkpoint.save(path, forecaster(), scaler=split(traffic).scaler, data=data)
    return path
