"""Parse the command line of ``lightning-zero`` and run a command.

The module imports neither torch nor Lightning: commands import them when they run.
"""

from __future__ import annotations

import atexit
import gc
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import NoReturn

from lightning_zero.cli.command import Command, Parser, UsageError, describe
from lightning_zero.cli.commands import COMMANDS, add_json
from lightning_zero.cli.invocation import program_name
from lightning_zero.errors import CheckpointError, NativeBuildError, UnsupportedError
from lightning_zero.version import __version__

SUMMARY = "Check a machine, plan a training, and convert checkpoints of lightning_zero."
DESCRIPTION = (
    "Results go to stdout, and progress and errors go to stderr. The exit status is 0 for success, 1 for a problem "
    "that the command reports, and 2 for a wrong command line."
)


def build_parser(commands: Sequence[Command]) -> Parser:
    parser = Parser(prog=program_name())
    describe(parser, SUMMARY, DESCRIPTION, ("doctor", "plan 1b --ranks 2 --device H100", "COMMAND --help"))
    version = f"lightning_zero {__version__}"
    parser.add_argument("--version", action="version", version=version, help="Show the version.")
    choices = parser.add_subparsers(title="commands", required=True, dest="command")
    for command in commands:
        own = choices.add_parser(command.name, help=command.summary)
        describe(own, command.summary, command.description, command.example)
        command.add_arguments(own)
        add_json(own)
        own.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run a command, and return the exit status: 0 for success, 1 for failure, 2 for a wrong command line.

    Without ``arguments``, which are those of this process then, the process is expected to end afterwards.
    """
    if arguments is None:
        # At its end Python would search all objects of torch for garbage, which takes 2 s of CPU.
        atexit.register(gc.freeze)
    parsed = build_parser(commands).parse_args(arguments)
    return run_command(parsed.run, parsed)


def run_command(run: Callable[[Namespace], int], arguments: Namespace) -> int:
    """Return the exit status of ``run(arguments)``. Print an error that a user can fix as one line."""
    # The default action of SIGTERM would end this process, and not the processes that it has started.
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        return run(arguments)
    except UsageError as error:
        command = getattr(arguments, "command", None)
        seen = f"\nFor the arguments, run: {program_name()} {command} --help" if command else ""
        print(f"error: {error}{seen}", file=sys.stderr)
        return 2
    except (CheckpointError, NativeBuildError, UnsupportedError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
