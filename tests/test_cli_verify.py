"""``sensitivity verify``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from sensitivity import checkpoint
from sensitivity.bounds import NAMES
from sensitivity.bounds import evaluate as bounds
from sensitivity.cli import commands
from sensitivity.jacobian import autodiff
from sensitivity.models import Forecaster
from sensitivity.traffic import describe, split, synthetic_city

RANDOM = ("--random", "dim=8,heads=2")


def run(*args: str) -> Result:
    return CliRunner().invoke(commands, ["verify", *args], prog_name="sensitivity")


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    traffic = synthetic_city(nodes=3, days=3, seed=1)
    data = describe(traffic) | {"protocol": "dcrnn", "input_length": 12, "horizon": 12}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Forecaster(nodes=3, dim=8, depth=2, heads=2).eval()
    path = tmp_path_factory.mktemp("model") / "ckpt.pt"
    checkpoint.save(path, model, scaler=split(traffic).scaler, data=data)
    return path


def verdicts(result: Result) -> dict[str, list[str]]:
    """Rows of the table by bound."""
    rows = (line.split() for line in result.stdout.splitlines())
    return {row[0]: row[1:] for row in rows if row and row[0] in NAMES}


def test_random_layers_hold():
    result = run("--random", "dim=8,heads=2,layers=2", "--lengths", "2,8", "--samples", "3")
    assert result.exit_code == 0, result.stderr
    found = verdicts(result)
    assert set(found) == set(NAMES)
    assert all(row[:2] == ["holds", "0"] for row in found.values())
    assert found["local"][2] == str(2 * 3 * (2**2 + 8**2))
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    assert "closed form and autodiff agree" in result.stdout


def test_a_model_holds_and_says_what_does_not_apply(ckpt):
    result = run("--model", str(ckpt), "--lengths", "6,12", "--samples", "2")
    assert result.exit_code == 0, result.stderr
    found = verdicts(result)
    assert found["stack"] == ["does", "not", "apply", "-", "-", "-", "-"]
    assert all(row[:2] == ["holds", "0"] for name, row in found.items() if name not in ("stack", "diagonal_lower"))
    assert "stack: the layers of a model have other parts between them" in result.stdout
    assert "does not hold: tokens are exchangeable over time" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_violation_exits_with_one_and_names_the_place(monkeypatch):
    """A bound made too small by half is found out."""
    original = bounds.EVALUATE["local"]

    def halved(problem):
        found = original[0](problem)
        return type(found)(found.measured, found.bound / 2, found.compared, found.blocks)

    monkeypatch.setitem(bounds.EVALUATE, "local", (halved, ()))
    result = run(*RANDOM, "--lengths", "4", "--samples", "1")
    assert result.exit_code == 1
    assert "violations of the bound 'local', the first in random at T=4, sample 0, query 0, key 0" in result.stderr
    assert verdicts(result)["local"][0] == "violated"


def test_a_wrong_closed_form_exits_with_one(monkeypatch):
    original = autodiff.norm_maps

    def shifted(*args, **options):
        found = original(*args, **options)
        found.total += 0.01
        return found

    monkeypatch.setattr(autodiff, "norm_maps", shifted)
    result = run(*RANDOM, "--lengths", "4", "--samples", "1")
    assert result.exit_code == 1
    assert "closed form and autodiff DISAGREE" in result.stdout
    assert "closed form and autodiff differ by" in result.stderr


def test_the_law_stands_beside_the_simulation():
    result = run("--random", "dim=8,heads=1", "--lengths", "4,16", "--samples", "2000", "--law")
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "The law of Gaussian tokens, random" in result.stdout
    table = [line.split() for line in result.stdout.splitlines() if line.split()[:1] in (["4"], ["16"])]
    assert [len(row) for row in table] == [9, 9]
    for row in table:
        assert float(row[3]) == pytest.approx(1, abs=0.02)
        assert float(row[8]) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "say what to verify, either with --model FILE or with --random dim=32,heads=4"),
        ((*RANDOM, "--samples", "0"), "--samples must be at least 1, not 0"),
        ((*RANDOM, "--layers", "a"), "--random draws its own layers and tokens, so --layers has no meaning"),
        (("--model", "none.pt", "--law"), "--law is about random tokens"),
        (("--random", "dim=7,heads=2"), "dim=7 is not divisible by heads=2"),
        (("--model", "none.pt"), "none.pt"),
    ],
)
def test_bad_input_is_one_sentence(arguments, text):
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr.replace("Say", "say", 1)
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""
