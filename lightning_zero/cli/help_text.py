"""Write the help of the program and of its commands."""

from __future__ import annotations

import shutil
import textwrap
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from lightning_zero.cli.invocation import program_name

LONGEST_LINE = 100  # characters; longer lines are hard to read on a wide terminal


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
