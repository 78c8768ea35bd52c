"""Parse the command line of ``python -m lightning_zero``, and run a command.

The command ``build`` is defined here, the others in modules of their own.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from lightning_zero.cli.checkpoint import CHECKPOINT
from lightning_zero.cli.command import Command
from lightning_zero.cli.doctor import DOCTOR
from lightning_zero.cli.plan_command import PLAN
from lightning_zero.cli.terminal import print_progress
from lightning_zero.errors import CheckpointError, NativeBuildError, UnsupportedError
from lightning_zero.native.build import LOCK_DEADLINE_S, build, is_built

__all__ = ["COMMANDS", "build_parser", "main", "run_command"]


def _add_build_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="by default $LIGHTNING_ZERO_CACHE or ~/.cache/lightning_zero; trainings look only there",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=LOCK_DEADLINE_S,
        metavar="S",
        help="seconds to wait for another process's build",
    )


def _run_build(arguments: Namespace) -> int:
    begin, was_built = time.monotonic(), arguments.cache is None and is_built()
    path = build(arguments.cache, deadline_s=arguments.deadline, report=print_progress)
    seconds = round(time.monotonic() - begin, 1)
    if arguments.json:
        print(json.dumps({"path": str(path), "seconds": seconds, "was_built_before": was_built}))
    else:
        print(path)
    return 0


BUILD = Command(
    "build",
    "Build the C++ executor, for images without a compiler, and print its path.",
    _add_build_arguments,
    _run_build,
)
COMMANDS: tuple[Command, ...] = (DOCTOR, BUILD, PLAN, CHECKPOINT)


def build_parser(commands: Sequence[Command]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m lightning_zero", description="Diagnose, plan and maintain ZeRO-3 trainings."
    )
    choices = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in commands:
        own = choices.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_arguments(own)
        own.add_argument("--json", action="store_true", help="print everything as JSON")
        own.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run a command, and return the exit status: 0 for success, 1 for failure, 2 for a wrong command line."""
    parsed = build_parser(commands).parse_args(arguments)
    return run_command(parsed.run, parsed)


def run_command(run: Callable[[Namespace], int], arguments: Namespace) -> int:
    """Return the exit status of ``run(arguments)``. Print an error that a user can fix as one line."""
    # The default action of SIGTERM would end this process, and not the processes that it has started.
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
