"""The one-way imports: every room imports only from the floors below it, and theory knows nothing of torch."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    {"errors"},
    {"checks", "describers", "diagonal_bias", "files", "modules"},
    {"attention", "statistics", "fit"},
    {"layers", "traffic"},
    {"adapters", "jacobian", "result", "models"},
    {"target", "collecting", "bounds", "checkpoint"},
    {"backends"},
    {"measure"},
    {"diagnosis"},
    {"sweep", "training"},
    {"plot"},
    {"report", "reproduction"},
    {"__init__"},  # the public API, which commands may use
    {"cli"},
)
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
EVERYWHERE = {"__version__"}  # of the package itself, for provenance
THEORY_MAY_USE = {"theory", "sympy", "mpmath", *sys.stdlib_module_names}


def test_the_design_page_shows_these_floors():
    shown = re.findall(r"^\| \d+ \| (.+) \|$", (ROOT / "docs" / "design.md").read_text(), flags=re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", rooms)) for rooms in shown] == list(FLOORS)


def room_of(path: Path, package: Path) -> str:
    """The room that a file of the package stands in."""
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, also inside functions; ``from a import b`` is ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide which room is meant"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def used_room(name: str) -> str | None:
    """The room behind a dotted name; the API for what the package itself exports; None for other packages."""
    parts = name.split(".")
    if parts[0] != "sensitivity" or (len(parts) == 2 and parts[1] in EVERYWHERE):
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LEVELS else "__init__"


def upward(source: str, room: str) -> list[str]:
    """The imports of a file in ``room`` that do not lead to a lower floor or stay in the room."""
    found = []
    for line, name in imported(source):
        target = used_room(name)
        if target is not None and target != room and LEVELS[target] >= LEVELS[room]:
            found.append(f"line {line}: {room} imports {name}, which is not below it")
    return found


SENSITIVITY = sorted((ROOT / "sensitivity").rglob("*.py"))
THEORY = sorted((ROOT / "theory").rglob("*.py"))


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path, ROOT / "sensitivity") for path in SENSITIVITY}
    assert rooms <= set(LEVELS), f"rooms without a floor: {sorted(rooms - set(LEVELS))}"
    assert len(SENSITIVITY) > 50
    assert len(THEORY) > 5


@pytest.mark.parametrize("path", SENSITIVITY, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_from_below(path: Path) -> None:
    assert upward(path.read_text("utf-8"), room_of(path, ROOT / "sensitivity")) == []


@pytest.mark.parametrize("path", THEORY, ids=lambda path: str(path.relative_to(ROOT)))
def test_theory_uses_sympy_only(path: Path) -> None:
    foreign = {name for _, name in imported(path.read_text("utf-8")) if name.split(".")[0] not in THEORY_MAY_USE}
    assert foreign == set()


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("statistics", "from sensitivity.result import SensitivityMap"),
        ("layers", "import sensitivity.models.forecaster"),
        ("attention", "def late():\n    from sensitivity import plot"),
        ("measure", "from sensitivity import SensitivityMap"),
        ("errors", "import sensitivity.checks"),
        ("models", "from sensitivity.adapters import capture"),
    ],
)
def test_upward_and_sideways_imports_are_found(room: str, source: str) -> None:
    assert len(upward(source, room)) == 1


def test_downward_imports_and_other_packages_are_left_alone() -> None:
    source = "import torch\nfrom sensitivity import __version__, measure\nfrom sensitivity.errors import InputError\n"
    assert upward(source, "plot") == []
