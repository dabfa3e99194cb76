"""The numbers on the page about regularisers are those of its own code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pages
import pytest
import torch

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "regularisers.md"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__page__"}
    with torch.random.fork_rng():
        for block in pages.blocks(PAGE):
            if block.language == "python":
                exec(compile(block.text, str(PAGE), "exec"), namespace)
    return namespace


def table() -> dict[tuple[str, int], list[float]]:
    rows = re.findall(r"^\| ([\w.,\- ]+) \| (12|96) \| ([\d. |]+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return {(name, int(length)): [float(cell) for cell in cells.split("|")] for name, length, cells in rows}


def test_every_row_of_the_tables(found: dict[str, Any]) -> None:
    shown = table()
    computed = found["rows"] | {("sink-penalty, 50 steps", 12): found["after"]}
    assert set(shown) == set(computed)
    for key, values in computed.items():
        tolerance = 0.05 if key[0].startswith("sink") else 0.005  # fifty steps of an optimiser
        assert shown[key] == pytest.approx(values, rel=tolerance, abs=0.006), key


def test_what_the_page_says_of_them(found: dict[str, Any]) -> None:
    rows = found["rows"]
    for length in (12, 96):
        plain = rows["none", length]
        for name in ("mask", "penalty -2", "length -2"):
            assert abs(rows[name, length][4] / plain[4] - 1) < 0.1
        assert abs(rows["penalty -0.05", length][4] / plain[4] - 1) < 0.005
        assert rows["gate 0.5", length][4] == pytest.approx(plain[4] / 2, rel=0.01)
        assert rows["gate 0.5", length][5] == pytest.approx(plain[5], rel=1e-6)
    assert rows["length -2", 96][1] == pytest.approx(rows["length -2", 12][1], rel=0.02)
    assert rows["penalty -2", 96][1] < rows["penalty -2", 12][1] / 7
