"""``sensitivity reproduce``."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sensitivity.cli import commands
from sensitivity.cli.reproduce import parse_seeds
from sensitivity.errors import InputError

SMALL = ["--data", "synthetic:nodes=2,days=2", "--dim", "4", "--depth", "1", "--heads", "2", "--epochs", "1"]
SMALL += ["--variants", "none,penalty", "--seeds", "0-1", "--windows", "2"]


def reproduce(*args: str) -> Result:
    return CliRunner().invoke(commands, ["reproduce", *args], prog_name="sensitivity")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("cli") / "run"
    return reproduce(*SMALL, "--out", str(out)), out


def test_prints_tables_that_fit_and_says_what_it_wrote(run: tuple[Result, Path]) -> None:
    result, out = run
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    end = next(place for place, line in enumerate(lines) if line.startswith("wrote"))
    assert max(map(len, lines[:end])) <= 80
    for title in ("Test error, 60 minutes ahead", "Paired differences to none", "Sensitivity at T=12"):
        assert any(line.startswith(title) for line in lines)
    assert "Sensitivity at T=96" not in result.stdout  # stands in the files
    assert "Sensitivity at T=96" in (out / "tables.md").read_text()
    assert result.stderr.splitlines()[:2] == ["none-0: begins", "none-0: done (1 of 4)"]


def test_run_again_it_takes_up_what_is_there(run: tuple[Result, Path]) -> None:
    first, out = run
    again = reproduce(*SMALL, "--out", str(out))
    assert again.stdout == first.stdout
    assert again.stderr.splitlines()[0] == "4 of 4 runs are there already"


def test_other_settings_are_refused(run: tuple[Result, Path]) -> None:
    result = reproduce(*SMALL, "--lr", "0.5", "--out", str(run[1]))
    assert result.exit_code == 2
    assert "holds a comparison with lr=0.0002, not 0.5" in result.stderr


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sensitivity.reproduction.runs.fit", interrupted)
    result = reproduce(*SMALL, "--out", str(tmp_path))
    assert result.exit_code == 130
    assert "Interrupted; what is done is kept: the same command goes on from there." in result.stderr


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "1-", "0.5"])
def test_refuses_seeds(text: str) -> None:
    with pytest.raises(InputError, match="--seeds takes integers from 0 up, as 0-4 or 0,1,2"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--variants", "none,x"], "unknown variant 'x'; choose from"),
        (["--jobs", "0"], "jobs must be an integer of at least 1, not 0."),
        (["--windows", "0"], "windows must be an integer of at least 1, not 0."),
        (["--data", "nowhere.h5"], "nowhere.h5"),
        (["--seeds", "x"], "--seeds takes integers"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(args: list[str], message: str, tmp_path: Path) -> None:
    result = reproduce(*SMALL, "--out", str(tmp_path / "run"), *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
