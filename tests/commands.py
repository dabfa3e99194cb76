"""Checks command lines that stand in pages against the command line itself, without running them."""

from __future__ import annotations

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


def check_commands(page: Path) -> None:
    """Parses every command of a page: unknown commands, options and values of the wrong kind are errors."""
    for words in pages.commands(page):
        if words[0] not in ("--help", "--version"):
            command(words[0]).make_context(words[0], list(words[1:]))


def known_options() -> set[str]:
    """Every long option of every command, and those of the tools around it that pages name."""
    found = {"--debug", "--help", "--version"}
    for name in group.list_commands(click.Context(group)):
        for parameter in command(name).params:
            found |= {option for option in (*parameter.opts, *parameter.secondary_opts) if option.startswith("--")}
    return found
