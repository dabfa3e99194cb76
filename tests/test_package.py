"""The package as a whole: what importing it costs, what it exports, and what is shipped."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sensitivity

ROOT = Path(__file__).parents[1]
HEAVY = [
    "sympy",
    "matplotlib",
    "seaborn",
    "xarray",
    "lightning",
    "h5py",
    "h5netcdf",
    "scipy",
    "pandas",
    "rich",
    "click",
]
HEAVY += ["transformers", "jinja2"]
ROOMS = ["bounds", "checkpoint", "fit", "layers", "models", "plot", "statistics", "traffic", "training"]


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120)


def project_field(name: str) -> str:
    """A one-line string of pyproject.toml (tomllib is newer than the oldest Python we support)."""
    lines = (ROOT / "pyproject.toml").read_text("utf-8").splitlines()
    (value,) = (line.split("=", 1)[1].strip().strip('"') for line in lines if line.split("=")[0].strip() == name)
    return value


def test_import_is_light_and_silent() -> None:
    code = f"import sensitivity, sys, json; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = run(code, "-W", "error")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout) == []


def test_theory_needs_no_torch() -> None:
    done = run("import theory, sys; print([name for name in ('torch', 'sensitivity', 'numpy') if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_versions_agree() -> None:
    assert sensitivity.__version__ == project_field("version")
    assert importlib.metadata.version("attention-sensitivity") == sensitivity.__version__


def test_public_names_exist_and_are_documented() -> None:
    for name in sensitivity.__all__:
        assert getattr(sensitivity, name).__doc__, name
    assert set(sensitivity.__all__) <= set(dir(sensitivity))


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_load_on_first_use(room: str) -> None:
    module = getattr(sensitivity, room)
    assert module is importlib.import_module(f"sensitivity.{room}")
    assert module.__doc__
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        assert value.__doc__ if callable(value) else value is not None, f"{room}.{name}"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'sensitivity' has no attribute 'nonsense'"):
        sensitivity.nonsense  # noqa: B018 - the access is the test


def test_the_wheel_ships_the_two_packages_and_nothing_else(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed here")
    wheel = next(builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"sensitivity", "theory"}
    assert {"sensitivity/py.typed", "theory/py.typed", "sensitivity/__init__.py"} <= set(names)
    assert any(name.endswith("entry_points.txt") for name in names)
    assert Path(wheel).name.startswith("attention_sensitivity-")
