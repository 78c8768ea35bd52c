"""What a command of ``python -m lightning_zero`` is."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Command"]


@dataclass(frozen=True)
class Command:
    """One of them. All take ``--json``.

    Attributes:
        name: by which users call it.
        summary: one line for ``--help``.
        add_arguments: its own, to its parser.
        run: does it, and returns the exit status. With ``arguments.json`` it prints one JSON document on stdout, and
            nothing else there.
    """

    name: str
    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
