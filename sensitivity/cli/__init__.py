"""The command line. A command's module is imported when the command is used, so that help comes at once."""

from sensitivity.cli.group import commands, main

__all__ = ["commands", "main"]
