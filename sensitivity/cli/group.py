"""The group of all commands, and what happens to their errors and warnings."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

import click

from sensitivity.errors import InputError, RunError, SensitivityWarning

COMMANDS = {
    "demo": "The tour: train a small model on a synthetic city, measure it.",
    "train": "Train a forecaster and test it beside the naive forecasts.",
    "reproduce": "Train the paper's variants over several seeds; compare and measure them.",
    "measure": "Measure how much every output time depends on every input time.",
    "data": "Look at a traffic file, or download METR-LA or PEMS-BAY.",
    "theory": "Print the derivations and bounds.",
    "verify": "Check closed forms and bounds against autodiff.",
}
"""Commands and their short help; each is the ``command`` of a module of this package."""

_OK, _FAILED, _BAD_INPUT, _INTERRUPTED, _PIPE = 0, 1, 2, 130, 141


class _ClosedPipeError(Exception):
    """The reader of standard output has gone."""


class LazyCommands(click.Group):
    """A group that knows its commands by name, and turns what they raise into a sentence and an exit code.

    ==================  ====  =====================================================
    raised              exit  on standard error
    ==================  ====  =====================================================
    ``InputError``      2     the sentence
    a usage error       2     the sentence, and where help is
    ``RunError``        1     the sentence
    Ctrl-C              130   the sentence, if the command has one
    a closed pipe       141   nothing
    anything else       1     one sentence, and that ``--debug`` shows more
    ==================  ====  =====================================================

    With ``--debug``, anywhere among the arguments, the traceback comes first.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands that are there."""
        return [name for name in COMMANDS if importlib.util.find_spec(f"sensitivity.cli.{name}") is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command's module."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"sensitivity.cli.{cmd_name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line for every command, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command line and leaves with its exit code (``standalone_mode=False`` raises and returns instead)."""
        words, debug = _without_debug(list(sys.argv[1:] if args is None else args))

        def run() -> Any:
            return super(LazyCommands, self).main(words, prog_name, complete_var, standalone_mode=False, **extra)

        if not standalone_mode:
            return run()
        with _one_line_warnings(debug):
            sys.exit(_guarded(run, debug))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; click would turn a closed pipe into a failed run."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ClosedPipeError from error


def _guarded(run: Callable[[], Any], debug: bool) -> int:
    """Runs, and returns the exit code."""
    try:
        result = run()
        sys.stdout.flush()
    except (BrokenPipeError, _ClosedPipeError):
        _silence_stdout()
        return _PIPE
    except Exception as error:
        if debug and not isinstance(error, click.ClickException | click.Abort):
            traceback.print_exc()
        return _report(error)
    except KeyboardInterrupt as error:
        return _interrupted(error)
    return result if isinstance(result, int) and not isinstance(result, bool) else _OK


def _report(error: Exception) -> int:
    """Says what went wrong; returns the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    if isinstance(error, click.UsageError):
        path = "sensitivity" if error.ctx is None else error.ctx.command_path
        _say(f"Error: {_sentence(error.format_message())} Try '{path} --help'.")
        return error.exit_code
    if isinstance(error, click.ClickException):
        _say(f"Error: {_sentence(error.format_message())}")
        return error.exit_code
    if isinstance(error, click.Abort):
        return _interrupted(error.__cause__ or error)
    if isinstance(error, InputError):
        _say(f"Error: {_sentence(str(error))}")
        return _BAD_INPUT
    if isinstance(error, RunError):
        _say(f"Error: {_sentence(str(error))}")
        return _FAILED
    what = " ".join(f"{type(error).__name__}: {error}".split())
    _say(f"Error: something unforeseen happened ({what}); run again with --debug for the traceback.")
    return _FAILED


def _interrupted(error: BaseException) -> int:
    text = str(error) or "interrupted."
    _say(text[0].upper() + text[1:])
    return _INTERRUPTED


def _sentence(text: str) -> str:
    """On one line, with a full stop."""
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _say(text: str) -> None:
    try:
        click.echo(text, err=True)
    except OSError:
        return


def _without_debug(words: list[str]) -> tuple[list[str], bool]:
    """The arguments without ``--debug``, and whether it was among them (before ``--``)."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--debug"]
    return kept + words[end:], len(kept) < end


@contextmanager
def _one_line_warnings(debug: bool) -> Iterator[None]:
    """The toolkit's warnings as one line each; those of other libraries only with ``--debug``."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        if issubclass(category, SensitivityWarning):
            _say(f"Warning: {_sentence(str(message))}")
        elif debug:
            _say(warnings.formatwarning(message, category, filename, lineno, line).rstrip())

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _silence_stdout() -> None:
    """Keeps Python from complaining about the closed pipe while it ends."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.option("--debug", is_flag=True, help="Show the traceback of an error; may stand anywhere.")
@click.version_option(package_name="attention-sensitivity", prog_name="sensitivity")
def commands(debug: bool) -> None:
    """Sensitivity of temporal attention: what it is, why, and what theory says about it."""


def main() -> NoReturn:
    """The console script."""
    commands(prog_name="sensitivity")
    raise SystemExit(_OK)
