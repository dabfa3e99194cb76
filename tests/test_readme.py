"""The README: its Python runs and prints what it shows, its commands exist and print what it shows."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import torch
from commands import check_commands, known_options

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
REFRESH = "the README is out of date, `python docs/refresh_readme.py` refreshes it"
BLOCKS = pages.blocks(README)
SHOWN = [(block, after) for block, after in itertools.pairwise(BLOCKS) if after.language == "text"]
COMMANDS = [(block.text.strip(), after.text) for block, after in SHOWN if block.language == "sh"]


def test_the_first_two_commands_set_up_a_fresh_machine() -> None:
    lines = [line for block in BLOCKS if block.language == "sh" for line in block.text.splitlines()]
    assert lines[:2] == ['pip install -e ".[dev]" && sensitivity demo', "pytest"]


def test_python_prints_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        pages.run(README)
    shown = "".join(after.text for block, after in SHOWN if block.language == "python")
    assert shown
    assert pages.alike(printed.getvalue(), shown), f"{REFRESH}: {printed.getvalue()}"
    assert (tmp_path / "map.nc").is_file()


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands_print_what_is_shown(command: str, shown: str, tmp_path: Path) -> None:
    words = next(pages.words(command))
    done = subprocess.run(
        [sys.executable, "-m", "sensitivity.cli", *words],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "80", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    printed = done.stdout or done.stderr
    assert pages.alike(printed, shown, tolerance=0.1), f"{REFRESH}: {printed}"
    assert (done.returncode == 2) == shown.startswith("Error:")


def test_commands_and_options_exist() -> None:
    check_commands(README)
    assert pages.options(README) - {"--keep-going"} <= known_options()


def test_shown_output_fits_a_terminal() -> None:
    assert all(len(line) <= 80 for _, after in SHOWN for line in after.text.splitlines())


def test_links_lead_somewhere_and_pictures_are_modest() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text("utf-8"))
    assert len(links) > 3
    for link in links:
        assert (ROOT / link).exists(), link
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.stat().st_size < 200_000, picture.name
