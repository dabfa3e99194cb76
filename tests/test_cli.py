"""The command line as a whole: help, errors, warnings, and the options that commands share."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec

import click
import pytest
from click.testing import CliRunner, Result

from sensitivity import __version__
from sensitivity.cli import commands, group
from sensitivity.cli.options import LENGTHS, device_option, out_option, parse_assignments, parse_lengths, seed_option
from sensitivity.errors import InputError, RunError, SensitivityWarning


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``sensitivity act ARGS``, where ``act`` is a command that does what it is told."""

    def go(act: Callable[[], object], *args: str) -> Result:
        @click.command()
        @click.option("--number", type=int)
        def command(number: int | None) -> object:
            """Acts."""
            return act()

        module = types.ModuleType("sensitivity.cli.act")
        module.command = command
        module.__spec__ = ModuleSpec("sensitivity.cli.act", None)
        monkeypatch.setitem(sys.modules, "sensitivity.cli.act", module)
        monkeypatch.setitem(group.COMMANDS, "act", "Acts.")
        return CliRunner().invoke(commands, ["act", *args], prog_name="sensitivity")

    return go


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InputError("dim is 7; choose 8."), 2, "Error: dim is 7; choose 8.\n"),
        (RunError("the loss became nan; lower the rate."), 1, "Error: the loss became nan; lower the rate.\n"),
        (InputError("two\n  lines"), 2, "Error: two lines.\n"),
        (KeyboardInterrupt("stopped; go on with --resume."), 130, "Stopped; go on with --resume.\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
        (
            ZeroDivisionError("by\nzero"),
            1,
            "Error: something unforeseen happened (ZeroDivisionError: by zero); run again with --debug for the "
            "traceback.\n",
        ),
    ],
)
def test_an_error_is_a_sentence_and_an_exit_code(
    run: Callable[..., Result], error: BaseException, code: int, text: str
) -> None:
    result = run(raising(error))
    assert (result.exit_code, result.stdout, result.stderr.lstrip("\n")) == (code, "", text)


@pytest.mark.parametrize("error", [InputError("bad."), RunError("bad."), ZeroDivisionError("bad")])
def test_debug_shows_the_traceback(run: Callable[..., Result], error: Exception) -> None:
    plain, debug = run(raising(error)), run(raising(error), "--debug")
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr
    assert debug.stderr.endswith(plain.stderr)
    assert debug.exit_code == plain.exit_code


def test_debug_stands_anywhere_but_behind_two_dashes(run: Callable[..., Result]) -> None:
    assert group._without_debug(["--debug", "act"]) == (["act"], True)
    assert group._without_debug(["act", "--", "--debug"]) == (["act", "--", "--debug"], False)
    assert run(lambda: None, "--debug").exit_code == 0


def test_a_closed_pipe_is_quiet(run: Callable[..., Result]) -> None:
    result = run(raising(BrokenPipeError(32, "Broken pipe")))
    assert (result.exit_code, result.output) == (141, "")


def test_a_real_closed_pipe_is_quiet() -> None:
    code = (
        "import sys, types, click; from sensitivity.cli import group, main\n"
        "from importlib.machinery import ModuleSpec\n"
        "m = types.ModuleType('sensitivity.cli.act'); m.__spec__ = ModuleSpec('sensitivity.cli.act', None)\n"
        "m.command = click.Command('act', callback=lambda: [click.echo('x' * 1000) for _ in range(1000)])\n"
        "sys.modules[m.__name__] = m; group.COMMANDS['act'] = 'Acts.'; sys.argv[1:] = ['act']; main()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            ["--number", "x"],
            "Error: Invalid value for '--number': 'x' is not a valid integer. Try 'sensitivity act --help'.",
        ),
        (["--nothing"], "Error: No such option '--nothing'. Try 'sensitivity act --help'."),
    ],
)
def test_bad_usage_is_one_line(run: Callable[..., Result], args: list[str], text: str) -> None:
    result = run(lambda: None, *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(text[:20])
    assert result.stderr.endswith(text[-len("Try 'sensitivity act --help'.") :] + "\n")


def test_an_unknown_command() -> None:
    result = CliRunner().invoke(commands, ["nothing"], prog_name="sensitivity")
    assert result.exit_code == 2
    assert "No such command 'nothing'" in result.stderr
    assert "Try 'sensitivity --help'." in result.stderr


def test_warnings_of_the_toolkit_are_one_line_and_others_silent(run: Callable[..., Result]) -> None:
    def act() -> None:
        warnings.warn("the file has\n NaN", SensitivityWarning, stacklevel=1)
        warnings.warn("about something else", UserWarning, stacklevel=1)
        click.echo("done")

    shown = warnings.showwarning
    result = run(act)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "done\n", "Warning: the file has NaN.\n")
    assert warnings.showwarning is shown
    assert "about something else" in run(act, "--debug").stderr


def test_help_lists_commands_without_importing_them() -> None:
    result = CliRunner().invoke(commands, ["--help"], prog_name="sensitivity")
    assert result.exit_code == 0
    assert group.COMMANDS["train"] in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    code = (
        "import sys; from sensitivity.cli import commands\n"
        "try: commands(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith('sensitivity.cli.')])\n"
        "heavy = ('lightning', 'matplotlib', 'sympy', 'xarray', 'h5py', 'scipy', 'rich')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-2:] == ["['sensitivity.cli.group']", "[]"]


def test_no_arguments_show_the_help() -> None:
    result = CliRunner().invoke(commands, [], prog_name="sensitivity")
    assert result.exit_code == 2
    assert "Usage: sensitivity" in result.stderr


def test_version() -> None:
    result = CliRunner().invoke(commands, ["--version"], prog_name="sensitivity")
    assert (result.exit_code, result.stdout) == (0, f"sensitivity, version {__version__}\n")


def test_standalone_mode_can_be_left_to_the_caller(run: Callable[..., Result]) -> None:
    run(lambda: None)
    with pytest.raises(click.UsageError):
        commands.main(["nothing"], standalone_mode=False)


# -- shared options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", [12]),
        ("12,24,48,96", [12, 24, 48, 96]),
        (" 24, 12 ,12", [12, 24]),
        ("8,...,1024", [8, 16, 32, 64, 128, 256, 512, 1024]),
        ("8,…,32", [8, 16, 32]),
        ("3,8,...,16,20", [3, 8, 16, 20]),
        ("8,...,16", [8, 16]),
        ("8,...,8", [8]),
    ],
)
def test_lengths(text: str, expected: list[int]) -> None:
    assert parse_lengths(text) == expected
    assert LENGTHS.convert(text, None, None) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12,a", "lengths must be integers, but '12,a' has 'a'; write them as 12,24,48"),
        ("12,1.5", "lengths must be integers, but '12,1.5' has '1.5'"),
        ("12,,24", "lengths must be integers, but '12,,24' has an empty place"),
        ("", "lengths must be integers, but '' has an empty place"),
        ("12,0", "lengths must be at least 1, not 0"),
        ("-4", "lengths must be at least 1, not -4"),
        ("8,...,100", "doubling from 8 does not reach 100; end at 64 or 128"),
        ("16,...,8", "doubling from 16 never comes down to 8; give the shortest length first"),
        ("...,8", "'...' stands between two lengths"),
        ("8,...", "'...' stands between two lengths"),
        ("8,...,...,16", "'...' stands between two lengths"),
    ],
)
def test_lengths_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_lengths(text)
    assert message in str(caught.value)


def test_assignments() -> None:
    known = {"dim": int, "scale": float}
    assert parse_assignments("dim=72, scale=0.5", known, "--random") == {"dim": 72, "scale": 0.5}
    assert parse_assignments("", known, "--random") == {}
    with pytest.raises(InputError, match=r"--random takes dim=..., scale=...; 'width=3' is none of them"):
        parse_assignments("width=3", known, "--random")
    with pytest.raises(InputError, match="'dim' is none of them"):
        parse_assignments("dim", known, "--random")
    with pytest.raises(InputError, match="--random: dim must be an integer, not 'x'"):
        parse_assignments("dim=x", known, "--random")
    with pytest.raises(InputError, match="--random: scale must be a number, not 'x'"):
        parse_assignments("scale=x", known, "--random")


def test_option_helpers() -> None:
    @click.command()
    @seed_option(3)
    @device_option()
    @out_option("here")
    @click.option("--lengths", type=LENGTHS)
    def command(**options: object) -> None:
        click.echo(sorted(options.items()))

    output = CliRunner().invoke(command, ["--lengths", "2,...,8"]).stdout
    assert output == "[('device', 'auto'), ('lengths', [2, 4, 8]), ('out', 'here'), ('seed', 3)]\n"
