"""The harness of the benchmarks at tiny sizes: that it runs, adds up, and writes the page that stands in the docs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import alternatives, child, growth, page, record, rivals, run, timing
from benchmarks.figures import FIGURES
from benchmarks.sections import SECTIONS, Section
from benchmarks.subjects import attention, model, single, tokens
from benchmarks.tables import Findings, Table, Target, duration, shown
from benchmarks.timing import interleaved, ratio, spread
from oracles import norm_map
from sequence_models import OldStyleSquare
from tolerances import assert_close

CIRCUMSTANCES: dict[str, Any] = {
    "date": "2026-01-31",
    "commit": "abc1234",
    "code": "def5678",
    "changed": False,
    "machine": {"processor": "Abacus", "cores": 2, "threads": 2, "memory": 2**33, "system": "Linux"},
    "versions": {"torch": "2.4.0", "python": "3.10.1"},
    "took": 12.3,
}


@pytest.mark.parametrize("name", SECTIONS)
def test_section_runs_and_is_rendered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # a process for every job takes seconds to start; one test below starts them
    monkeypatch.setattr(child, "run", lambda job, environment=None, **arguments: child.JOBS[job](**arguments))
    monkeypatch.setattr(timing, "SHORTEST", 0.0)
    section = SECTIONS[name]
    findings = section.run(**section.quick)
    plain = json.loads(json.dumps(findings.plain()))
    assert Findings.of(plain).plain() == plain
    text = page.render({name: plain | CIRCUMSTANCES})
    assert f"## {section.title}" in text
    for table in findings.tables:
        assert table.rows
        assert table.markdown() in text
    cells = [cell for table in findings.tables for row in table.rows for cell in row]
    assert not [cell for cell in cells if isinstance(cell, str) and "fails" in cell]
    assert all(target.value is not None for target in findings.targets)


def test_every_section_is_kept_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.main(["--quick", "--threads", "1", "--only", "closed-form", "--out", str(tmp_path)])
    assert "closed-form: " in capsys.readouterr().out
    run.main(["--quick", "--threads", "1", "--only", "engines,spectral", "--out", str(tmp_path)])
    assert set(record.read(tmp_path)) == {"closed-form", "engines", "spectral"}
    text = (tmp_path / "benchmarks.md").read_text("utf-8")
    titles = [section.title for name, section in SECTIONS.items() if name not in record.read(tmp_path)]
    assert f"Not measured yet: {', '.join(titles)}." in text


def test_a_section_that_fails_does_not_take_the_others_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Findings:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(SECTIONS, "memory", Section("Memory", "", fails))
    monkeypatch.setitem(SECTIONS, "start-up", Section("Start-up", "", lambda: Findings([])))
    with pytest.raises(SystemExit, match="failed: memory; the others are kept"):
        run.main(["--only", "memory,start-up", "--threads", "1", "--out", str(tmp_path)])
    assert set(record.read(tmp_path)) == {"start-up"}


def test_only_the_sections_that_are_missing(tmp_path: Path) -> None:
    code = record.git("rev-parse", "--short", "HEAD:sensitivity")
    for name in ("closed-form", "memory"):
        about = CIRCUMSTANCES | {"code": code if name == "memory" else "other"}
        record.keep(tmp_path, name, Findings([]), about)
    options = run.parsed(["--missing", "--only", "closed-form,memory,start-up", "--out", str(tmp_path)])
    assert options.only == ["closed-form", "start-up"]
    assert run.parsed(["--render", "--out", str(tmp_path)]).only == []


def test_rounds_are_changed_where_there_are_any(tmp_path: Path) -> None:
    options = run.parsed(["--quick", "--rounds", "5", "--out", str(tmp_path)])
    assert run.arguments(SECTIONS["start-up"], options) == {"rounds": 5}
    assert run.arguments(SECTIONS["memory"], options) == SECTIONS["memory"].quick


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "closed-form,nonsense"], "no section 'nonsense'; there are closed-form, alternatives"),
        (["--quick"], "--quick needs --out FOLDER: its numbers mean nothing"),
    ],
)
def test_errors_of_the_command(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.parsed(words)
    assert message in capsys.readouterr().err


def test_kept_numbers_of_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "benchmarks.json").write_text('{"format": 0, "sections": {}}', encoding="utf-8")
    with pytest.raises(SystemExit, match="has format 0, not 1: remove it and measure again"):
        record.read(tmp_path)


def test_the_page_stands_as_its_numbers_say() -> None:
    kept = record.read(record.DOCS)
    text = (record.DOCS / "benchmarks.md").read_text("utf-8")
    assert text == page.render(kept), "docs/benchmarks.md is out of date: python tests/benchmarks/run.py --render"


def test_sections_of_different_code_and_machines_say_so() -> None:
    one = Findings([], [Target("map over forward pass", 2.5, 3.0), Target("gain", 1.5, 2.0, least=True)]).plain()
    kept = {"closed-form": one | CIRCUMSTANCES, "start-up": Findings([]).plain() | CIRCUMSTANCES}
    text = page.render(kept)
    assert "All sections measured the same state of the package." in text
    assert "Machine: Abacus, 2 cores, 2 threads, 8 GiB of memory, Linux. Versions: torch 2.4.0, python 3.10.1." in text
    assert "| map over forward pass | at most 3x | 2.5x | yes |" in text
    assert "| gain | at least 2x | 1.5x | **no** |" in text
    assert "Measured on 2026-01-31 at commit abc1234 (package def5678), in 12 s." in text
    for change in ({"code": "other"}, {"changed": True}):
        text = page.render(kept | {"start-up": kept["start-up"] | change})
        assert "**The sections measured different states of the package**" in text
    text = page.render(kept | {"start-up": kept["start-up"] | {"versions": {"torch": "2.5.0"}, "date": "2026-01-01"}})
    assert "*Start-up* was measured elsewhere: Abacus, 2 cores, 2 threads, 8 GiB of memory, Linux; torch 2.5.0." in text


def test_missing_numbers_are_no_success() -> None:
    assert not Target("peak", None, 1.0, note="MemoryError").met
    assert (
        Target("peak", None, 3 * 2**30, "B", note="MemoryError")
        .row()
        .endswith("at most 3 GiB | - (MemoryError) | **no** |")
    )


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (3.2e-5, "s", "32 µs"),
        (0.1234, "s", "123 ms"),
        (7.0, "s", "7 s"),
        (150.0, "s", "2.5 min"),
        (86_400.0, "s", "24 h"),
        (2.718, "x", "2.72x"),
        (12_345.6, "x", "12,346x"),
        (3 * 2**30, "B", "3 GiB"),
        (100, "B", "100 B"),
        (1.234e-5, "e", "1.2e-05"),
        (96.04, "1/s", "96 per second"),
        (65_536, "", "65,536"),
        (None, "s", "-"),
        ("one run", "s", "one run"),
    ],
)
def test_cells(value: Any, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_numbers_stand_to_the_right() -> None:
    lines = Table("Times.", {"what": "", "time": "s"}, [["map", 0.5], ["other", None]]).markdown().splitlines()
    assert lines == ["*Times.*", "", "| what | time |", "|---|---:|", "| map | 500 ms |", "| other | - |"]


def test_jobs_take_turns() -> None:
    order: list[str] = []
    times = interleaved({name: lambda name=name: order.append(name) for name in "abc"}, 3, cold={"a", "b", "c"})
    assert "".join(order) == "abcbcacab"
    assert [len(found) for found in times.values()] == [3, 3, 3]


def test_short_jobs_are_repeated_and_counted_once() -> None:
    times = interleaved({"nap": lambda: time.sleep(0.002)}, 2)
    assert all(0.002 <= one < 0.02 for one in times["nap"])


def test_a_ratio_is_that_of_a_round() -> None:
    drifting = [1.0, 10.0, 100.0]
    assert ratio([3 * one for one in drifting], drifting) == pytest.approx(3.0)
    assert spread([2.0, 3.0], [1.0, 1.0]) == "2 to 3"


def test_growth_of_a_power_law() -> None:
    values = [256, 512, 1024, 2048]
    law = growth.growth(values, [[factor * 1e-6 * value**2 for value in values] for factor in (1.0, 1.1)])
    assert growth.in_words(law) == "2.00 (2.00 to 2.00)"
    plain = {"exponent": -law.exponent, "intercept": law.intercept}
    assert growth.value_at(plain, 1000) == pytest.approx(1.05)


def test_lengths_for_a_time_lie_between_those_that_were_timed_or_beyond_at_least_quadratic() -> None:
    entry = {"values": [10, 20, 40], "times": [1.0, 1.5, 3.0]}
    assert growth.longest(entry, 1.5) == pytest.approx(20)
    assert growth.longest(entry, 2.0) == pytest.approx(20 * 2.0 / 1.5)  # the last step doubles
    assert growth.longest(entry, 12.0) == pytest.approx(80)
    assert growth.longest(entry | {"times": [1.0, 2.0, 16.0]}, 128.0) == pytest.approx(80)


def test_durations_have_a_unit_that_fits() -> None:
    assert [duration(value) for value in (-1.63, 2e-5, 0.25, 90.0, 600.0)] == [
        "-1.63 s",
        "20 µs",
        "250 ms",
        "90 s",
        "10 min",
    ]


def test_what_is_affordable_is_computed() -> None:
    law = {"exponent": 2.0, "intercept": 0.0}
    entry = {"axis": "T", "values": [1, 2], "times": [1.0, 4.0], "law": law}
    text = growth.afford({"map over T": entry, "generic over D": {"axis": "D", "values": [1], "law": law}})
    assert "a second reaches T=1, a minute T=8, an hour T=60; the map alone takes $4 T^2$ bytes, 256 B at" in text
    assert "Lengths beyond those that were timed (at most T=2) go on" in text
    assert "Factors on the generic engine's time: 4.0 for twice the width." in text


@pytest.mark.parametrize("way", rivals.WAYS)
def test_every_way_gives_the_map(way: str) -> None:
    layer, data = attention(8, 2).double(), tokens(5, 8).double()
    expected = norm_map(layer, data)[0]
    assert_close(rivals.quiet_map(way, single(layer), data[0]), expected, "maps")
    assert_close(rivals.quiet_map(way, rivals.first(single(layer), 2), data[0]), expected[:2], "maps")


def test_a_way_that_fails_comes_last() -> None:
    found = rivals.fastest(OldStyleSquare.apply, tokens(4, 3)[0], 1)
    assert [rival.kind for rival in found if rival.error] == ["jacrev"]
    assert found[-1].kind == "jacrev"
    assert "functorch" in found[-1].error


def test_a_long_alternative_is_extrapolated_and_says_so() -> None:
    subject, data = model("GRU", 8), tokens(6, 8)
    rival = rivals.Rival("functional.jacobian", guess=6.0)
    found = rivals.compare(lambda: None, rival, single(subject), data[0], limit=2.0, rounds=3)
    assert found.note == "extrapolated from 2 of 6 rows"
    assert found.found.shape == (2, 6)


def test_a_dense_jacobian_beyond_the_memory_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(job: str, length: int = 0, **_: Any) -> dict[str, float]:
        return {"peak": 100 + length**2, "above": length**2, "seconds": 1.0}

    monkeypatch.setattr(child, "run", told)
    rows = alternatives.run_memory((10, 20, 40, 80), free=2500.0).tables[0].rows
    assert [row[:4] for row in rows] == [
        [10, 1.0, 200, None],
        [20, 1.0, 500, 500],
        [40, 1.0, 1700, 1700],
        [80, "not run: too large", None, 6500],
    ]


def test_the_peak_of_a_child_is_its_own() -> None:
    ballast = bytearray(b"1") * 2**29
    small, large = child.run("hold", size=2**20), child.run("hold", size=2**28)
    assert len(ballast) == 2**29
    assert small["peak"] < 2**28
    assert 0.99 * 2**28 <= large["above"] < 1.1 * 2**28


def test_a_child_that_fails_says_why() -> None:
    assert child.run("nonsense")["error"] == "KeyError: 'nonsense'"
    assert child.run("nothing", limit=0.01) == {"error": "stopped after 0 s"}


def test_figures_are_drawn_from_the_numbers(tmp_path: Path) -> None:
    law = {"exponent": 2.0, "intercept": -10.0}
    entry = {"values": [1, 2, 4, 8], "times": [1.0, 4.0, 16.0, 64.0], "law": law}
    data = {"map over T": entry | {"axis": "T"}, "generic over D": entry | {"axis": "D"}}
    for file, _, draw in FIGURES["growth"]:
        draw(data, tmp_path / file)
        assert (tmp_path / file).stat().st_size > 5000
