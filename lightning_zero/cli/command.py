"""Define the interface of a command of ``python -m lightning_zero``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Command"]


@dataclass(frozen=True)
class Command:
    """A command. All commands take ``--json``.

    Attributes:
        name: Name on the command line.
        summary: One line for ``--help``.
        add_arguments: Adds the command's arguments to its parser.
        run: Runs the command and returns the exit status. With ``arguments.json`` it prints one JSON document on
            stdout, and nothing else there.
    """

    name: str
    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
