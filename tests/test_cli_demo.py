"""``sensitivity demo``."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sensitivity.cli import commands


def demo(*args: str) -> Result:
    return CliRunner().invoke(commands, ["demo", *args], prog_name="sensitivity")


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("demo") / "tour"
    return demo("--quick", "--out", str(out)), out


def test_the_tour_says_what_it_found(tour: tuple[Result, Path]) -> None:
    result, out = tour
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    summary = json.loads((out / "measurement" / "summary.json").read_text())
    first = summary["layers"][0]
    assert f"a state depends {first['sink_ratio']['raw']:.0f} times as much on its own input" in text
    assert f"goes as T^{-first['decay']['off_diagonal']['exponent']:.2f}" in text
    metrics = json.loads((out / "model" / "metrics.json").read_text())
    assert f"its mean error is {metrics['test']['12']['mae']:.1f} mph" in text
    assert ", 0 violations." in text
    for name in ("decay.png", "heatmap_blocks.0.temporal.png", "path_shares.png"):
        assert name in text
        assert (out / "measurement" / name).is_file()


def test_run_again_it_only_tells(tour: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    result, out = tour
    from sensitivity import training

    monkeypatch.setattr(training, "fit", lambda settings: pytest.fail("trained again"))
    again = demo("--quick", "--out", str(out))
    assert again.exit_code == 0, again.stderr
    assert again.stdout == result.stdout


def test_another_tour_does_not_overwrite(tour: tuple[Result, Path]) -> None:
    _, out = tour
    result = demo("--quick", "--seed", "3", "--out", str(out))
    assert result.exit_code == 2
    assert "holds another run; choose another folder with --out." in result.stderr


def test_without_the_training_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] == "lightning":
            raise ImportError("No module named 'lightning'")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    result = demo("--quick", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "training needs the package lightning, which is not installed" in result.stderr
    assert not (tmp_path / "out").exists()
