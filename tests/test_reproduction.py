"""The comparison of variants over seeds: what is trained, what is taken up, and that every number is what it says."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sensitivity import checkpoint
from sensitivity.errors import InputError, RunError
from sensitivity.reproduction import PAPER, Comparison, Plan, Probe, reproduce, runs
from sensitivity.reproduction.contents import csv_files, paper_table, tables
from sensitivity.reproduction.output import write
from sensitivity.reproduction.paired import paired
from sensitivity.reproduction.published import TABLE, published
from sensitivity.reproduction.sensitivities import STATISTICS, mean_map, measure_cell
from sensitivity.reproduction.tables import Table, spread
from sensitivity.training import Settings, fit
from sensitivity.training.evaluate import evaluate

SMALL = Settings(data="synthetic:nodes=2,days=2", dim=4, heads=2, depth=2, epochs=1, lr=1e-2, protocol="paper")
VARIANTS = ("none", "mask", "no-residual")
PROBE = Probe(windows=2)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comparison") / "out"


@pytest.fixture(scope="module")
def plan(place: Path) -> Plan:
    return Plan(SMALL, place, VARIANTS, (0, 3))


@pytest.fixture(scope="module")
def found(plan: Plan) -> Comparison:
    return reproduce(plan, PROBE)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


class TestPaired:
    @given(st.lists(st.tuples(*[st.floats(-1e3, 1e3)] * 2), min_size=2, max_size=9))
    def test_the_interval_is_that_of_the_paired_t_test(self, pairs: list[tuple[float, float]]) -> None:
        values, base = (dict(enumerate(side)) for side in zip(*pairs, strict=True))
        differences = np.array(list(values.values())) - np.array(list(base.values()))
        one = paired(values, base)
        assert one.mean == pytest.approx(differences.mean())
        if np.ptp(differences) > 1e-6:
            expected = stats.ttest_rel(list(values.values()), list(base.values())).confidence_interval(0.95)
            assert (one.low, one.high) == pytest.approx(tuple(expected), rel=1e-9, abs=1e-9)

    def test_covers_the_true_difference_as_often_as_it_says(self) -> None:
        rng, hits = np.random.default_rng(0), 0
        for _ in range(2000):
            base = rng.normal(size=5)
            values = base + 0.3 + 0.2 * rng.normal(size=5)
            one = paired(dict(enumerate(values)), dict(enumerate(base)))
            hits += one.low <= 0.3 <= one.high
        assert 0.935 < hits / 2000 < 0.965

    def test_counts_only_seeds_that_both_have(self) -> None:
        one = paired({0: 1.0, 1: 2.0, 7: 9.0}, {0: 0.0, 1: 0.0, 8: 5.0})
        assert (one.mean, one.pairs) == (1.5, 2)

    def test_one_pair_has_no_interval_and_none_no_mean(self) -> None:
        assert math.isnan(paired({0: 1.0}, {0: 0.5}).low)
        assert paired({0: 1.0}, {0: 0.5}).verdict == "-"
        assert math.isnan(paired({0: 1.0}, {1: 0.5}).mean)

    @pytest.mark.parametrize(("shift", "verdict"), [(-1.0, "lower"), (1.0, "higher"), (0.0, "not shown")])
    def test_the_verdict_says_on_which_side_of_zero_it_lies(self, shift: float, verdict: str) -> None:
        assert paired({0: shift + 0.1, 1: shift - 0.1}, {0: 0.0, 1: 0.0}, 0.5).verdict == verdict


class TestPlan:
    def test_runs_seed_by_seed_so_that_pairs_are_whole(self, plan: Plan) -> None:
        assert [cell.name for cell in plan.cells][:4] == ["none-0", "mask-0", "no-residual-0", "none-3"]

    def test_has_the_five_variants_of_the_paper_by_default(self, tmp_path: Path) -> None:
        assert len(Plan(SMALL, tmp_path).cells) == 25
        assert set(PAPER) == set(TABLE)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"variants": ()}, "at least one of variants; none was given"),
            ({"seeds": ()}, "at least one of seeds; none was given"),
            ({"variants": ("none", "none")}, "variants must differ, but 'none' is named twice"),
            ({"seeds": (1, 2, 1)}, "seeds must differ, but 1 is named twice"),
            ({"variants": ("none", "masc")}, "unknown variant 'masc'; choose from none,"),
            ({"seeds": (-1,)}, "seed must be an integer of at least 0, not -1"),
        ],
    )
    def test_refuses(self, change: dict, message: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=message):
            Plan(SMALL, tmp_path, **change)

    @pytest.mark.parametrize(("given", "used"), [({}, 0.1), ({"sink_weight": 0.3}, 0.3)])
    def test_a_sink_weight_is_of_the_sink_penalty_alone(self, given: dict, used: float, tmp_path: Path) -> None:
        plan = Plan(Settings(**given), tmp_path, ("none", "mask", "sink-penalty"), (0,))
        assert [cell.settings.sink_weight for cell in plan.cells] == [0.0, 0.0, used]
        if given:
            with pytest.raises(
                InputError, match="a sink weight belongs to the variant sink-penalty, which is not among no-"
            ):
                Plan(Settings(**given), tmp_path)

    def test_refuses_a_folder_of_other_settings_before_anything_is_trained(self, plan: Plan, found: Comparison) -> None:
        other = dataclasses.replace(plan, settings=dataclasses.replace(SMALL, dim=8))
        with pytest.raises(InputError, match=r"holds a comparison with dim=4, not 8; choose another --out"):
            reproduce(other)

    def test_refuses_a_damaged_manifest_and_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").write_text("{")
        with pytest.raises(InputError, match=r"manifest\.json cannot be read"):
            reproduce(Plan(SMALL, tmp_path))
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="file"):
            reproduce(Plan(SMALL, tmp_path / "file"))

    def test_says_in_the_manifest_what_became_of_every_run(self, plan: Plan, found: Comparison) -> None:
        content = json.loads((plan.folder / "manifest.json").read_text())
        assert {(run["variant"], run["seed"]): run["state"] for run in content["runs"]} == {
            (cell.variant, cell.seed): "done" for cell in plan.cells
        }
        assert content["settings"] == plan.identity()
        assert all((plan.folder / run["folder"] / "ckpt.pt").is_file() for run in content["runs"])


class TestRuns:
    def test_every_run_is_what_fit_makes_of_its_settings(self, plan: Plan, found: Comparison, tmp_path: Path) -> None:
        settings = dataclasses.replace(SMALL, variant="mask", seed=3, out=str(tmp_path / "run"))
        assert fit(settings).metrics["test"] == found.metrics["mask-3"]["test"]

    def test_done_runs_and_measurements_are_not_made_again(
        self, plan: Plan, found: Comparison, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(*_: object, **__: object) -> None:
            raise AssertionError("made again")

        monkeypatch.setattr(runs, "fit", never)
        monkeypatch.setattr("sensitivity.reproduction.sensitivities.sweep", never)
        again = reproduce(dataclasses.replace(plan), PROBE)
        assert csv_files(again) == csv_files(found)

    def test_an_interrupted_comparison_ends_with_the_same_numbers(
        self, found: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = Plan(SMALL, tmp_path / "out", VARIANTS, (0, 3))
        real, begun = runs.fit, []

        def stops(settings: Settings, **options: object) -> object:
            begun.append(settings.variant)
            if len(begun) == 3:
                raise KeyboardInterrupt
            return real(settings, **options)

        monkeypatch.setattr(runs, "fit", stops)
        with pytest.raises(KeyboardInterrupt):
            reproduce(plan)
        assert csv_files(reproduce(plan))["scores.csv"] == csv_files(found)["scores.csv"]

    def test_more_seeds_may_be_added(self, tmp_path: Path) -> None:
        first = reproduce(Plan(SMALL, tmp_path, ("none",), (0,)))
        both = reproduce(Plan(SMALL, tmp_path, ("none",), (0, 1)))
        assert both.metrics["none-0"] == first.metrics["none-0"]
        assert set(both.scores("none", "12", "mae")) == {0, 1}

    def test_a_run_that_fails_is_recorded_and_the_others_go_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = runs.fit

        def fails(settings: Settings, **options: object) -> object:
            if settings.variant == "mask":
                raise RunError("the training loss became nan")
            return real(settings, **options)

        monkeypatch.setattr(runs, "fit", fails)
        plan = Plan(SMALL, tmp_path, ("mask", "none"), (0,))
        told: list[tuple[str, str]] = []
        found = reproduce(plan, told=lambda cell, state: told.append((cell.name, state)))
        assert found.variants == ("none",)
        assert found.failures == {"mask-0": "the training loss became nan"}
        assert told == [("mask-0", "begins"), ("mask-0", "failed"), ("none-0", "begins"), ("none-0", "done")]
        states = {run["variant"]: run for run in json.loads((tmp_path / "manifest.json").read_text())["runs"]}
        assert states["mask"]["state"] == "failed"
        assert states["mask"]["reason"] == "the training loss became nan"

    def test_a_comparison_without_one_good_run_is_an_error(self, tmp_path: Path) -> None:
        diverging = dataclasses.replace(SMALL, lr=1e38, clip=1e30)
        with pytest.raises(RunError, match=r"all 1 runs failed; the first, none-0: the training loss became"):
            reproduce(Plan(diverging, tmp_path, ("none",), (0,)))

    def test_runs_side_by_side_are_the_same_runs(self, found: Comparison, tmp_path: Path) -> None:
        both = reproduce(Plan(SMALL, tmp_path, ("none", "mask"), (0,)), jobs=2)
        for name in ("none-0", "mask-0"):
            assert both.metrics[name]["test"]["12"] == pytest.approx(found.metrics[name]["test"]["12"], rel=1e-5)

    @pytest.mark.parametrize("jobs", [0, True, -2])
    def test_refuses_jobs(self, jobs: int, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=f"jobs must be an integer of at least 1, not {jobs}"):
            reproduce(Plan(SMALL, tmp_path), jobs=jobs)

    def test_a_damaged_score_file_is_named_with_the_way_out(self, tmp_path: Path) -> None:
        plan = Plan(SMALL, tmp_path, ("none",), (0,))
        plan.cells[0].folder.mkdir(parents=True)
        (plan.cells[0].folder / "metrics.json").write_text("{")
        with pytest.raises(InputError, match=r"metrics\.json cannot be read .*; remove .*none-0 to run it again"):
            reproduce(plan)


class TestSensitivities:
    def test_are_those_of_the_trained_models(self, plan: Plan, found: Comparison) -> None:
        cell = next(cell for cell in plan.cells if cell.name == "mask-3")
        sweep = found.sweeps["mask"][3]
        assert sweep.lengths == found.lengths == (12, 96)
        assert float(sweep.record(found.layers[0], 12).statistics["diagonal_attention"]) == 0.0
        assert sweep.provenance["model"]["sha256"] == checkpoint.load(cell.folder / "ckpt.pt").sha256

    def test_without_residual_its_path_is_zero(self, found: Comparison) -> None:
        assert set(found.sensitivity("no-residual", "diagonal_residual", 12).values()) == {0.0}
        assert min(found.sensitivity("none", "diagonal_residual", 12).values()) == pytest.approx(2.0)  # sqrt(dim)

    def test_other_settings_are_measured_anew(self, plan: Plan, found: Comparison) -> None:
        cell = plan.cells[0]
        assert measure_cell(cell, Probe(windows=3, lengths=(12,))).lengths == (12,)
        assert measure_cell(cell, PROBE).lengths == (12, 96)

    def test_the_mean_over_layers_is_geometric(self, found: Comparison) -> None:
        each = [found.sensitivity("none", "sink_ratio", 12, layer)[3] for layer in found.layers]
        assert found.sensitivity("none", "sink_ratio", 12)[3] == pytest.approx(math.sqrt(each[0] * each[1]))

    def test_ratios_are_paired_in_logarithms(self, found: Comparison) -> None:
        values, base = (found.sensitivity(name, "sink_ratio", 12) for name in ("no-residual", "none"))
        one = found.ratio("no-residual", "sink_ratio", 12)
        assert one.mean == pytest.approx(math.sqrt(values[0] / base[0] * values[3] / base[3]))
        assert one.low < one.mean < one.high
        assert found.ratio("mask", "diagonal_value", 12).mean == 0.0

    def test_the_mean_map_has_a_sample_for_every_seed(self, found: Comparison) -> None:
        one = mean_map(found.sweeps["none"], found.layers[1], 12)
        assert one.samples == 2
        assert torch.equal(one.norms[1], found.sweeps["none"][3].map(found.layers[1], 12).norms[0])

    @pytest.mark.parametrize("name", ["windows", "sensors"])
    def test_refuses_sizes(self, name: str) -> None:
        with pytest.raises(InputError, match=f"{name} must be an integer of at least 1, not 0"):
            Probe(**{name: 0})


class TestTables:
    def test_scores_are_those_of_the_checkpoints(self, plan: Plan, found: Comparison) -> None:
        cell = plan.cells[1]
        loaded = checkpoint.load(cell.folder / "ckpt.pt")
        result = fit(dataclasses.replace(cell.settings, resume=True))
        again = evaluate(loaded.model, result.split.scaler, result.split.test, 37)
        row = next(r for r in rows(csv_files(found)["scores.csv"]) if r["variant"] == "mask" and r["minutes"] == "60")
        assert float(row["rmse"]) == pytest.approx(again["12"]["rmse"], rel=1e-6)

    def test_differences_are_those_of_the_scores(self, found: Comparison) -> None:
        files = csv_files(found)
        scores = {(r["variant"], r["seed"]): float(r["mae"]) for r in rows(files["scores.csv"]) if r["minutes"] == "30"}
        row = next(
            r
            for r in rows(files["paired.csv"])
            if (r["variant"], r["minutes"], r["metric"]) == ("no-residual", "30", "mae")
        )
        expected = np.mean([scores["no-residual", seed] - scores["none", seed] for seed in ("0", "3")])
        assert float(row["difference"]) == pytest.approx(expected)

    def test_every_line_fits_the_terminal(self, found: Comparison) -> None:
        for table in tables(found):
            assert max(map(len, table.console().splitlines())) <= 80, table.console()
            assert "\u2026" not in table.console()

    def test_published_numbers_stand_beside_with_where_they_come_from(self, found: Comparison) -> None:
        text = "\n".join(table.console() for table in tables(found))
        assert "3.997" in text
        assert "published: arXiv 2602.10956, full METR-LA (207 sensors), depth 12, width 72" in text
        assert published("none", 60) == (3.989, 8.418, 11.708)
        assert published("none", 45) is None
        assert published("none", 7.5) is None

    def test_the_wide_table_has_every_horizon_and_the_naive_forecasts(self, found: Comparison) -> None:
        table = paper_table(found)
        assert len(table.header) == 10
        assert [row[0] for row in table.rows] == [*VARIANTS, *found.naive]
        assert all(len(row) == 10 for row in table.rows)

    def test_without_the_base_there_are_no_differences(self, plan: Plan, found: Comparison) -> None:
        alone = reproduce(dataclasses.replace(plan, variants=("mask", "no-residual")), PROBE)
        assert not any("difference" in table.title.lower() for table in tables(alone))
        assert rows(csv_files(alone)["paired.csv"]) == []

    def test_latex_and_markdown_are_well_formed(self) -> None:
        table = Table("50 % of a_b", ("x", "two\nlines"), (("r_1", spread([1.0, 2.0], 2)),), ("caption",))
        latex = table.latex()
        assert r"\caption{50 \% of a\_b. caption.}" in latex
        assert r"r\_1" in latex
        assert r"1.50$\pm$0.71" in latex
        assert latex.count(r"\begin{") == latex.count(r"\end{") == 2
        assert "| x   |   two lines |" in table.markdown()

    def test_what_is_undefined_is_a_dash_and_an_empty_cell(self) -> None:
        assert spread([math.nan], 3) == "-"
        assert spread([math.nan, 1.0], 1) == "1.0"


class TestFiles:
    def test_holds_all_tables_numbers_and_figures(self, found: Comparison) -> None:
        written = write(found)
        assert {"tables.md", "tables.tex", "scores.csv", "paired.csv", "sensitivity.csv"} < set(written)
        assert len([name for name in written if name.endswith(".png")]) == len(found.layers) * len(found.lengths)
        assert all((found.plan.folder / name).stat().st_size for name in written)
        assert written[-1] == "comparison.json"
        origin = json.loads((found.plan.folder / "comparison.json").read_text())
        assert origin["settings"]["dim"] == 4
        assert origin["runs"] == dict.fromkeys(VARIANTS, 2)
        head = (found.plan.folder / "sensitivity.csv").read_text().splitlines()
        assert head[0].split(",")[4:] == list(STATISTICS)
        assert len(head) == 1 + len(VARIANTS) * 2 * 2 * 2

    def test_without_measurement_there_are_no_sensitivities(self, plan: Plan, found: Comparison) -> None:
        bare = reproduce(plan)
        assert "sensitivity.csv" not in csv_files(bare)
        assert not any("Sensitivity" in table.title for table in tables(bare))
