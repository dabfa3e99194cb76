"""``sensitivity data``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pages
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from sensitivity.cli import commands
from sensitivity.cli import data as data_command
from sensitivity.errors import RunError
from sensitivity.traffic import fetch, summarise, synthetic_city, write
from sensitivity.traffic.download import Fetched
from sensitivity.traffic.published import DATASETS, Dataset, Published

IDS = ["11", "22", "33", "44"]


def run(*args: object) -> Result:
    return CliRunner().invoke(commands, ["data", *map(str, args)], prog_name="sensitivity")


def entries(result: Result) -> dict[str, str]:
    """The text behind every label of the screen."""
    found: dict[str, str] = {}
    label = ""
    for line in result.stdout.splitlines():
        label = line[:10].strip() or label
        found[label] = f"{found.get(label, '')} {line[10:].strip()}".strip()
    return found


def series(rows: int = 600) -> pd.DataFrame:
    """Four sensors with known holes: one dead, one stuck."""
    values = np.random.default_rng(0).uniform(20, 60, size=(rows, 4)).round(1)
    values[:, 2], values[:, 3] = 0, 55
    values[100:130, 0] = 0
    values[300:310] = 0
    values[305:306, 1] = np.nan
    index = pd.date_range("2012-03-01", periods=rows, freq="5min")
    return pd.DataFrame(values, index, IDS)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    series().to_csv(tmp_path / "a.csv")
    return tmp_path / "a.csv"


def test_the_screen(csv: Path, tmp_path: Path) -> None:
    matrix = np.array([[1, 0.5, 0, 0], [0.25, 1, 0, 0], [0, 0.7, 1, 0], [0, 0, 0, 1]])
    np.savez(tmp_path / "g.npz", graph=matrix, sensor_ids=np.array(IDS))
    result = run("info", csv, "--graph", tmp_path / "g.npz")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert len(result.stdout.splitlines()) <= 24
    found = entries(result)
    assert found["file"] == f"a.csv, {csv.stat().st_size:,} bytes, text, commas between values"
    assert found["published"] == "no: none of the published files of METR-LA and PEMS-BAY"
    assert found["size"] == "600 steps x 4 sensors"
    assert found["time"] == "2012-03-01 00:00 to 2012-03-03 01:55, every 5 min"
    assert found["index"] == "regular"
    values = series().to_numpy()
    valid = values[values > 0]
    assert found["values"].startswith(f"{valid.min():g} to {valid.max():g}, mean {valid.mean():.2f};")
    assert found["values"].endswith("the unit is not stated, mph is assumed")
    missing = 1 - valid.size / values.size
    assert found["missing"] == f"{100 * missing:.2f} % of all cells ({(values == 0).sum()} zeros and 1 NaN of 2,400)"
    assert found["gap"] == "longest at one sensor: 30 steps (2.5 h) from 2012-03-01 08:20, 11"
    assert found["silence"] == "10 steps without any reading; longest: 10 steps (50 min) from 2012-03-02 01:00"
    assert found["dead"] == "1 sensor without any reading (33); 1 sensor stuck at one value (44)"
    assert found["graph"] == (
        "g.npz, all sensors are among its 4 ids 7 edges (4 self-loops), not symmetric (3 one-way or unequal), weights "
        "0.25 to 1; 1 sensor alone"
    )
    assert "note" in found
    assert "has 1 NaN values" in found["note"]


def test_the_splits_have_their_exact_counts(csv: Path) -> None:
    values = series().to_numpy()
    missing = ~(values > 0)
    rows = {  # windows, and the rows their targets lie in: 600 rows, 577 windows
        "dcrnn": [(404, 12, 427), (58, 416, 485), (115, 474, 600)],
        "paper": [(397, 12, 420), (37, 432, 480), (97, 492, 600)],
    }
    table = [line.split() for line in run("info", csv).stdout.splitlines()]
    for protocol, parts in rows.items():
        (line,) = (words for words in table if words[:1] == [protocol])
        expected = [text for count, a, b in parts for text in (str(count), f"{100 * missing[a:b].mean():.2f}", "%")]
        assert line[1:] == expected


def test_a_small_share_is_not_hidden(tmp_path: Path) -> None:
    values = np.full((600, 60), 50.0)
    values[580, 3] = 0
    np.save(tmp_path / "a.npy", values)
    result = run("info", tmp_path / "a.npy")
    assert entries(result)["missing"] == "0.003 % of all cells (1 zeros and 0 NaN of 36,000)"
    assert re.search(r"dcrnn +404  0.00 % +58  0.00 % +115  0.01 %", result.stdout)


def test_the_ten_sensors_of_metr_la(metr_la: Path) -> None:
    result = run("info", metr_la / "metr-la-10.h5", "--graph", metr_la / "adj_mx.pkl")
    assert (result.exit_code, result.stderr) == (0, "")
    found = entries(result)
    assert found["missing"].startswith("7.41 % of all cells (25,391 zeros")
    assert found["size"] == "34,272 steps x 10 sensors"
    assert "all sensors are among its 207 ids" in found["graph"]
    assert re.search(r"dcrnn +23,974  6.37 % +3,425  9.02 % +6,850 10.21 %", result.stdout)
    assert re.search(r"paper +23,967  6.37 % +3,404  9.05 % +6,831 10.24 %", result.stdout)


def test_a_published_file_is_known_by_its_checksum(csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Published("a.h5", f"sha256:{summarise(csv).sha256}", None, "", "the authors", "")
    monkeypatch.setitem(DATASETS, "metr-la", Dataset("METR-LA", 4, 600, "", "", (file,)))
    found = entries(run("info", csv))
    assert found["published"] == "yes: METR-LA, a.h5 as served by the authors"
    assert " mph, mean" in found["values"]
    assert "assumed" not in found["values"]


def test_a_graph_with_a_symmetric_matrix_and_no_ids(csv: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "g.npy", np.ones((4, 4)))
    found = entries(run("info", csv, "--graph", tmp_path / "g.npy"))
    assert found["graph"].startswith(
        "g.npy, without ids: the order of the data is taken 16 edges (4 self-loops), symmet"
    )


def test_arrays_without_times_or_ids(tmp_path: Path) -> None:
    np.save(tmp_path / "vel.npy", series().to_numpy())
    found = entries(run("info", tmp_path / "vel.npy"))
    assert found["time"].endswith("every 5 min (assumed: the file has no times)")
    assert found["sensors"] == "0, 1, 2, 3 (counted: the file has no ids)"
    assert found["graph"] == "none given; --spatial distance would need one"
    assert "has no times: its rows are taken as 5-minute steps" in found["note"]


def test_channels_and_keys(tmp_path: Path) -> None:
    values = series().to_numpy()
    np.savez(tmp_path / "a.npz", flow=values * 9, both=np.stack([values * 9, values], axis=-1))
    assert run("info", tmp_path / "a.npz").exit_code == 2
    found = entries(run("info", tmp_path / "a.npz", "--key", "both", "--channel", "1"))
    assert found["file"].endswith("array 'both', float64 (600 x 4 x 2)")
    assert found["values"].startswith(f"{np.nanmin(values[values > 0]):g} to {np.nanmax(values):g},")


def test_an_irregular_file_is_described_and_refused(tmp_path: Path) -> None:
    table = series()
    index = table.index.to_numpy().copy()
    index[50] = index[49]
    pd.concat([table.set_axis(pd.DatetimeIndex(index)).iloc[:200], table.iloc[206:]]).to_csv(tmp_path / "a.csv")
    result = run("info", tmp_path / "a.csv")
    assert result.exit_code == 2
    found = entries(result)
    assert found["index"] == "irregular, rows 1 repeated, 2 after a gap (7 steps left out)"
    assert found["size"] == "594 steps x 4 sensors"
    assert "dcrnn" not in result.stdout
    assert re.search(
        r"^Error: .*a.csv has an irregular time index: row 50 \(2012-03-01T04:05:00\) repeats", result.stderr
    )
    assert len(result.stderr.splitlines()) == 1


def test_values_that_are_no_speeds_are_described_and_refused(tmp_path: Path) -> None:
    table = series()
    table.iloc[3, 1] = -5
    table.to_csv(tmp_path / "a.csv")
    result = run("info", tmp_path / "a.csv")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "has 1 negative speeds (the first is -5" in result.stderr
    assert entries(result)["size"] == "600 steps x 4 sensors"


def test_a_clock_change_is_told(tmp_path: Path) -> None:
    index = pd.date_range("2017-03-11", "2017-03-14", freq="5min", tz="US/Pacific").tz_localize(None)
    pd.DataFrame(np.full((len(index), 2), 60.0), index, ["1", "2"]).to_csv(tmp_path / "a.csv")
    result = run("info", tmp_path / "a.csv")
    assert (result.exit_code, result.stderr) == (0, "")
    assert entries(result)["index"] == "regular; the clock goes from 2017-03-12 01:55 to 2017-03-12 03:00"


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("gone.h5", None, "there is no file"),
        ("a.h5", b"not hdf5", "is not an HDF5 file (it may be damaged or cut short)"),
        ("a.csv", b"", "is empty."),
        ("a.csv", b"a,b\n1,x\n2,y\n", "has 'x' in line 2, where a speed is expected"),
        ("a.npz", b"PK", "is not a complete .npz file of numbers"),
        ("a.xlsx", b"x", "is of an unknown kind; the name must end in .h5, .npz, .npy or .csv."),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, name: str, content: bytes | None, text: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = run("info", tmp_path / name)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert text in result.stderr


def test_a_graph_that_does_not_fit(csv: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", graph=np.eye(2), sensor_ids=np.array(["11", "99"]))
    result = run("info", csv, "--graph", tmp_path / "g.npz")
    assert result.exit_code == 2
    assert "lacks 3 of the data's 4 sensors (the first is '22'; its own ids look like '11')" in result.stderr
    assert entries(result)["size"] == "600 steps x 4 sensors"


def test_short_files_have_no_splits(tmp_path: Path) -> None:
    series(24).to_csv(tmp_path / "a.csv")
    result = run("info", tmp_path / "a.csv")
    assert result.exit_code == 0
    assert entries(result)["splits"] == "none: 24 steps are too few for windows of 12 + 12 steps in every part"


def test_the_synthetic_city(tmp_path: Path) -> None:
    path = write(synthetic_city(5, 2), tmp_path / "city.npz")
    found = entries(run("info", path))
    assert found["size"] == "576 steps x 5 sensors"
    assert "self-loops" in found["graph"]  # the graph in the file itself


# -- fetch -----------------------------------------------------------------------------------------------------------


def test_fetch_says_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds, graph = DATASETS["metr-la"].speeds[1], DATASETS["metr-la"].graphs[0]

    def fetch_files(name: str, to: str, **options: object) -> list[Fetched]:
        assert (name, to) == ("metr-la", str(tmp_path))
        return [
            Fetched(tmp_path / speeds.name, speeds, new=True, failures=("the authors' Google Drive answered 403",)),
            Fetched(tmp_path / graph.name, graph, new=False),
        ]

    monkeypatch.setattr("sensitivity.traffic.fetch", fetch_files)
    result = run("fetch", "metr-la", "--to", tmp_path)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "not served right: the authors' Google Drive answered 403",
        f"{tmp_path / 'METR-LA.csv'}: downloaded from Zenodo",
        f"  checksum as published: {speeds.checksum}",
        f"{tmp_path / 'adj_mx.pkl'}: there already, nothing downloaded",
        f"  checksum as published: {graph.checksum}",
        f"next: sensitivity data info {tmp_path / 'METR-LA.csv'} --graph {tmp_path / 'adj_mx.pkl'}",
    ]


def test_fetch_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch_files(*args: object, **options: object) -> None:
        raise RunError("metr-la.h5 could not be fetched.")

    monkeypatch.setattr("sensitivity.traffic.fetch", fetch_files)
    result = run("fetch", "metr-la")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "Error: metr-la.h5 could not be fetched.\n")
    assert fetch is not fetch_files


def test_fetch_of_anything_else() -> None:
    result = run("fetch", "taxi")
    assert result.exit_code == 2
    assert "'taxi' is not one of 'metr-la', 'pems-bay'. Try 'sensitivity data fetch --help'." in result.stderr


def test_the_bar_takes_what_pooch_tells_it() -> None:
    bar = data_command._Bar(DATASETS["pems-bay"].speeds[1])
    assert bar.total is None
    bar.total = 0
    assert bar.total is None
    bar.total = 100
    bar.update(60)
    bar.reset()
    bar.update(100)
    assert (bar.total, bar._progress.tasks[0].completed) == (100, 100)
    bar.close()
    bar.close()


def test_the_help_is_light() -> None:
    code = (
        "import sys; from sensitivity.cli import commands\n"
        "try: commands(['data', 'fetch', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'pooch', 'requests', 'h5py', 'rich') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"
    for args in ([], ["info"], ["fetch"]):
        assert max(map(len, run(*args, "--help").stdout.splitlines())) <= 80


def test_the_screen_in_the_documentation(tmp_path: Path) -> None:
    page = Path(__file__).parents[1] / "docs" / "data.md"
    blocks = list(pages.blocks(page))
    place = next(i for i, block in enumerate(blocks) if block.text.strip() == "sensitivity data info city.npz")
    write(synthetic_city(nodes=6, days=5, seed=1), tmp_path / "city.npz")
    shown, found = (
        [line for line in text.splitlines() if line.split()[0] not in ("file", "sha256")]  # packed in other ways
        for text in (blocks[place + 1].text, run("info", tmp_path / "city.npz").stdout)
    )
    assert pages.alike("\n".join(found), "\n".join(shown))
