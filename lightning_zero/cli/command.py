"""Define the interface of a command of ``lightning-zero``, and its help."""

from __future__ import annotations

import shutil
import textwrap
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from lightning_zero.cli.invocation import program_name

LONGEST_LINE = 100  # characters; longer lines are hard to read on a wide terminal


class UsageError(ValueError):
    """An argument has a wrong value, which only the command itself can detect. The exit status is 2."""


@dataclass(frozen=True)
class Command:
    """A command. All commands take ``--json``.

    Attributes:
        name: Name on the command line.
        summary: One sentence for the program's ``--help``.
        add_arguments: Adds the command's arguments to its parser. It imports neither torch nor Lightning.
        run: Runs the command and returns the exit status. With ``arguments.json`` it prints one JSON document on
            stdout, and nothing else there.
        description: Sentences for the command's own ``--help``, after the summary.
        example: Lines of a shell, without the program's name; a ``#`` begins a comment.
    """

    name: str
    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    description: str = ""
    example: tuple[str, ...] = ()


def _width() -> int:
    return min(shutil.get_terminal_size().columns, LONGEST_LINE + 2) - 2


class _HelpFormatter(RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples."""

    def __init__(self, prog: str, **_: Any) -> None:
        super().__init__(prog, max_help_position=26, width=_width())


class Parser(ArgumentParser):
    """Reports an error in two lines, without the whole usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"add_help": False, "formatter_class": _HelpFormatter})
        self.add_argument("-h", "--help", action="help", help="Show this help.")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nFor the arguments, run: {self.prog} --help\n")


def describe(parser: ArgumentParser, summary: str, description: str = "", example: Sequence[str] = ()) -> None:
    """Set the sentences before the arguments and the example after them."""
    fill = partial(textwrap.fill, width=_width(), break_on_hyphens=False)
    parser.description = "\n\n".join(fill(text) for text in (summary, description) if text)
    if example:
        lines = [f"  {program_name()} {line}" for line in example]
        parser.epilog = "\n".join(["example:" if len(lines) == 1 else "examples:", *lines]).replace("%", "%%")
