"""Reads Markdown pages: their code blocks, the commands in them, and the options they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


class Block(NamedTuple):
    """A fenced block: its language, its text, and its line in the page."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text("utf-8")
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in _FENCE.finditer(text)]


def words(shell: str) -> Iterator[list[str]]:
    """The arguments of every ``sensitivity`` command in a piece of shell."""
    for line in shell.replace("\\\n", " ").splitlines():
        for part in line.removeprefix("$ ").split("&&"):
            found = shlex.split(part, comments=True)
            if found[:1] == ["sensitivity"]:
                yield found[1:]


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every ``sensitivity`` command in a page's shell blocks."""
    for block in blocks(page):
        if block.language in ("sh", "bash", "shell", "console"):
            yield from words(block.text)


def options(page: Path) -> set[str]:
    """Every option that the page names in running text or tables, such as ``--lengths``."""
    prose = _FENCE.sub("", page.read_text("utf-8"))
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose))


def run(page: Path, language: str = "python") -> None:
    """Executes a page's blocks in one namespace; lines in a traceback are those of the page."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    for block in blocks(page):
        if block.language == language:
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            exec(code, namespace)


def alike(found: str, expected: str, tolerance: float = 0.02) -> bool:
    """Whether two texts are the same up to spacing, and up to ``tolerance`` in their numbers."""
    if _NUMBER.sub("#", found).split() != _NUMBER.sub("#", expected).split():
        return False
    pairs = zip(_NUMBER.findall(found), _NUMBER.findall(expected), strict=True)
    return all(abs(float(one) - float(two)) <= tolerance * max(abs(float(two)), 0.01) for one, two in pairs)
