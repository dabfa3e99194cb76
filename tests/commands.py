"""Checks command lines that stand in pages against the command line itself, without running them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pages

from sensitivity.cli import commands as group


def command(name: str) -> click.Command:
    """The command of this name."""
    context = click.Context(group)
    found = group.get_command(context, name)
    assert found is not None, f"there is no command {name!r}; there are {', '.join(group.list_commands(context))}"
    return found


def leaf(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words name, inside groups of commands too, and the words left for it."""
    found, rest = command(words[0]), words[1:]
    while isinstance(found, click.Group):
        assert set(rest[:1]) & set(found.commands), f"{words} names none of {', '.join(found.commands)}"
        found, rest = found.commands[rest[0]], rest[1:]
    return found, rest


def leaves() -> Iterator[click.Command]:
    """Every command that runs, inside groups of commands too."""
    waiting = [command(name) for name in group.list_commands(click.Context(group))]
    while waiting:
        found = waiting.pop()
        if isinstance(found, click.Group):
            waiting += found.commands.values()
        else:
            yield found


def check_commands(page: Path) -> None:
    """Parses every command of a page: unknown commands, options and values of the wrong kind are errors."""
    for words in pages.commands(page):
        if words[0] not in ("--help", "--version"):
            found, rest = leaf(list(words))
            found.make_context(found.name, rest)


def known_options() -> set[str]:
    """Every long option of every command, and those of the tools around it that pages name."""
    found = {"--debug", "--help", "--version"}
    for one in leaves():
        for parameter in one.params:
            found |= {option for option in (*parameter.opts, *parameter.secondary_opts) if option.startswith("--")}
    return found
