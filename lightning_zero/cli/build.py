"""``build``: the C++ executor ahead of time, as in the image of a container that will have no compiler."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_zero.cli.command import Command
from lightning_zero.cli.show import print_progress
from lightning_zero.native.build import LOCK_DEADLINE_S, build, is_built

__all__ = ["BUILD"]


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="by default $LIGHTNING_ZERO_CACHE or ~/.cache/lightning_zero; trainings look only there",
    )
    parser.add_argument(
        "--deadline", type=float, default=LOCK_DEADLINE_S, metavar="S", help="seconds to wait for somebody else's build"
    )


def _run(arguments: Namespace) -> int:
    begun, was_there = time.monotonic(), arguments.cache is None and is_built()
    path = build(arguments.cache, deadline_s=arguments.deadline, report=print_progress)
    seconds = round(time.monotonic() - begun, 1)
    if arguments.json:
        print(json.dumps({"path": str(path), "seconds": seconds, "was_built_before": was_there}))
    else:
        print(path)
    return 0


BUILD = Command("build", "Builds the C++ executor ahead of time, and prints its path.", _add_arguments, _run)
