"""Gathers everything, prints it, and ends with "ok" or the one thing to mend."""

from __future__ import annotations

import json
import os
import socket
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from lightning_zero.cli.command import Command
from lightning_zero.cli.doctor import machine, software
from lightning_zero.cli.doctor.hosts import Job, compared, said
from lightning_zero.cli.doctor.network import network
from lightning_zero.cli.doctor.self_test import self_test
from lightning_zero.cli.doctor.verdict import notes, to_mend
from lightning_zero.cli.show import show_section, tell
from lightning_zero.errors import NativeBuildError
from lightning_zero.native.build import build

__all__ = ["DOCTOR"]

LIMIT_S = 120.0
HEARD_S = 60.0  # that ranks have to be heard by rank 0: hosts may start at different times
IN_JSON_ONLY = {"losses", "plain_losses", "failed", "missing", "to_mend", "notes"}


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--no-self-test", action="store_true", help="only look; builds and starts nothing")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help="seconds that the self-test gets (default %(default)g)",
    )


def _run(arguments: Namespace) -> int:
    """Where a launcher has started several, rank 0 tells of all hosts, and the first rank of each other host only how
    its own self-test ended."""
    facts, job, host = gather(), Job.of(os.environ), socket.gethostname()
    if job is not None:
        heard = job.heard(said(facts, host, to_mend(facts)), HEARD_S)
        if job.local_rank != 0 and job.rank != 0:
            return 0
        if job.rank == 0:
            facts["hosts"] = compared(job.world_size, heard)
    if not arguments.no_self_test and not to_mend(facts):
        facts |= _test(arguments.limit, quiet=arguments.json)
    facts["to_mend"], facts["notes"] = to_mend(facts), notes(facts)
    facts["ok"] = not facts["to_mend"]
    if job is not None and job.rank != 0:
        print(f"{host}: {'ok' if facts['ok'] else facts['to_mend'][0]}", file=sys.stderr)
    elif arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts)
    return 0 if facts["ok"] else 1


def gather() -> dict[str, Any]:
    """All that can be known without starting anything, by section."""
    found = machine.devices()
    return {
        "versions": machine.versions(),
        "devices": found or ["cpu"],
        "links": machine.links(len(found)),
        "system": machine.system(),
        "network": network(),
        "compilation": software.compilation(),
        "executor": software.executor(),
        "caches": software.caches(),
        "variables": software.variables(),
    }


def _test(limit_s: float, quiet: bool) -> dict[str, Any]:
    say = _nothing if quiet else tell
    try:
        build(say=say)  # here, and not within the limit
    except NativeBuildError as error:
        return {"build_error": str(error)}
    say("A tiny model is trained on all devices.")
    return {"self_test": self_test(limit_s), "executor": software.executor()}


def _nothing(line: str, *values: object) -> None:
    pass


def _show(facts: dict[str, Any]) -> None:
    sections = ["versions", "system", "network", "compilation", "executor", "caches", "variables", "self_test", "hosts"]
    show_section("devices", {str(number): device for number, device in enumerate(facts["devices"])})
    if len(facts["devices"]) > 1:
        sections.insert(0, "links")
    for section in sections:
        if facts.get(section):
            show_section(section.replace("_", "-"), {k: v for k, v in facts[section].items() if k not in IN_JSON_ONLY})
    for note in facts["notes"]:
        print(f"note: {note}")
    print("\nok" if facts["ok"] else f"\nto mend: {facts['to_mend'][0]}")


DOCTOR = Command(
    "doctor",
    "What this machine has, what a training will do with it, and whether a tiny one comes out right.",
    _add_arguments,
    _run,
)
