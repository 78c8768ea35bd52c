"""Define the interface of a command of ``lightning-zero``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


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
