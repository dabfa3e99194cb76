"""The bar that appears where a measurement takes long and somebody watches."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from sensitivity.collecting import progress


class Screen(io.StringIO):
    """Standard error as a terminal shows it; set within a test, because pytest puts its own back before each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, terminal: bool = True, patience: float = -1.0) -> None:
        super().__init__()
        self.terminal = terminal
        monkeypatch.setattr(sys, "stderr", self)
        monkeypatch.setattr(progress, "PATIENCE", patience)
        for name, value in (("TERM", "xterm"), ("COLUMNS", "80")):
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("NO_COLOR", raising=False)

    def isatty(self) -> bool:
        return self.terminal


def run(items: list[int]) -> list[int]:
    return list(progress.watched(items, sum(items), lambda item: item, "measuring a layer"))


def test_a_long_one_shows_how_far_it_is(monkeypatch):
    screen = Screen(monkeypatch)
    assert run([30, 70]) == [30, 70]
    assert "measuring a layer" in screen.getvalue()
    assert "100%" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # the bar is wiped from the line


def test_a_short_one_writes_nothing_and_loads_nothing(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    screen = Screen(monkeypatch, patience=60.0)
    assert run([1, 2]) == [1, 2]
    assert screen.getvalue() == ""
    assert "rich" not in sys.modules


def test_nothing_is_written_where_nobody_watches(monkeypatch):
    screen = Screen(monkeypatch, terminal=False)
    assert run([1, 2]) == [1, 2]
    assert screen.getvalue() == ""


def test_the_bar_goes_away_after_an_error(monkeypatch):
    screen = Screen(monkeypatch)

    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        list(progress.watched(items(), 4, lambda item: item, "measuring"))
    assert "measuring" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")
