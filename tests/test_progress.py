"""The bar that appears where a measurement takes long and somebody watches."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator

import pytest
from oracles import draw
from rich.errors import LiveError
from rich.progress import Progress
from sequence_models import DIM, LENGTH, transformer

from sensitivity import SoftmaxAttention, backends, measure
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
    return list(progress.watched(items, sum(items), lambda item: item, "measuring", "a layer"))


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
        list(progress.watched(items(), 4, lambda item: item, "measuring", "layer"))
    assert "measuring" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")


def shares(screen: Screen) -> list[int]:
    """The percentages that were shown, in order."""
    return [int(share) for share in re.findall(r"(\d+)%", screen.getvalue())]


class TestMeasurements:
    @pytest.mark.parametrize("keep", ["map", "statistics"])
    def test_differentiation_shows_its_rows(self, keep, monkeypatch):
        screen = Screen(monkeypatch)
        measure(transformer().eval(), draw(2, LENGTH, DIM).float(), keep=keep, chunk=DIM)
        assert "differentiating TransformerEncoder" in screen.getvalue()
        assert shares(screen)[-1] == 100

    def test_one_bar_for_many_steps(self, monkeypatch):
        monkeypatch.setattr(backends, "_BLOCK", 2 * LENGTH)
        screen = Screen(monkeypatch)
        measure(transformer().eval(), draw(1, LENGTH, DIM).float(), keep="statistics")
        assert shares(screen)[-1] == 100
        assert screen.getvalue().count("\x1b[?25l") == 1  # the cursor is hidden once for each bar

    def test_the_closed_form_shows_its_tiles(self, monkeypatch):
        screen = Screen(monkeypatch)
        measure(SoftmaxAttention.random(DIM, 1), draw(1, LENGTH, DIM).float())
        assert "measuring attention" in screen.getvalue()
        assert shares(screen)[-1] == 100

    def test_the_end_of_a_long_name_stays(self, monkeypatch):
        screen = Screen(monkeypatch)
        name = "backbone.transformer_encoder.layers.10.self_attention"
        list(progress.watched([1], 1, lambda item: item, "differentiating", name))
        assert "differentiating …ayers.10.self_attention " in screen.getvalue()
        assert shares(screen)[-1] == 100

    def test_a_display_of_the_callers_own_stays(self, monkeypatch):
        """Older versions of rich allow one at a time, and raise where another one starts."""
        screen = Screen(monkeypatch)

        def refused(self: Progress) -> None:
            raise LiveError("Only one live display may be active at once")

        monkeypatch.setattr(Progress, "start", refused)
        found = measure(SoftmaxAttention.random(DIM, 1), draw(1, LENGTH, DIM).float())
        assert found.length == LENGTH
        assert screen.getvalue() == ""
