"""The pages of the documentation: their Python runs, and the commands and options in them exist."""

from __future__ import annotations

from pathlib import Path

import pages
import pytest
import torch
from commands import check_commands, known_options

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if not {"generated", "_build"} & set(path.relative_to(DOCS).parts))
IDS = [str(path.relative_to(DOCS)) for path in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():  # pages draw tokens as a reader would, from the global stream
        torch.manual_seed(0)
        pages.run(page)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_of_the_page_exist(page: Path) -> None:
    check_commands(page)
    assert pages.options(page) <= known_options()


def test_text_is_compared_up_to_numbers() -> None:
    assert pages.alike("ratio  9.74 (uniform: 1)\n", "ratio 9.73 (uniform: 1)")
    assert not pages.alike("ratio 9.7", "ratio 8.7")
    assert not pages.alike("ratio 9.7", "index 9.7")
