"""Finds the command that was asked for, and runs it."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import NoReturn

from lightning_zero.cli.build import BUILD
from lightning_zero.cli.checkpoint.command import CHECKPOINT
from lightning_zero.cli.command import Command
from lightning_zero.cli.doctor import DOCTOR
from lightning_zero.cli.plan_command import PLAN
from lightning_zero.errors import CheckpointError, NativeBuildError, UnsupportedError

__all__ = ["COMMANDS", "main", "build_parser", "run_command"]

COMMANDS: tuple[Command, ...] = (DOCTOR, BUILD, PLAN, CHECKPOINT)


def build_parser(commands: Sequence[Command]) -> ArgumentParser:
    """Of the whole command line."""
    parser = ArgumentParser(prog="python -m lightning_zero", description="Looks after trainings with ZeRO-3.")
    choices = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in commands:
        own = choices.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_arguments(own)
        own.add_argument("--json", action="store_true", help="print everything as JSON")
        own.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run a command, and return the exit status: 0 if all is well, 1 if not, 2 for a wrong command line."""
    chosen = build_parser(commands).parse_args(arguments)
    return run_command(chosen.run, chosen)


def run_command(run: Callable[[Namespace], int], arguments: Namespace) -> int:
    """Return the exit status of ``run(arguments)``. Print an error that a user can fix as one line."""
    # A plain SIGTERM would end this process, and not the processes that it has started.
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        return run(arguments)
    except (CheckpointError, NativeBuildError, UnsupportedError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
