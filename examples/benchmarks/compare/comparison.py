"""Run peers one after the other, each in its own processes. The row of a peer that fails says why."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compare.baselines import OURS, PEERS
from compare.job import Job
from lightning_zero.cli.local_ranks import run_ranks

__all__ = ["HEADS", "RANK", "Devices", "brief", "cells", "compare", "ratios"]

HOME = str(Path(__file__).resolve().parents[1])
RANK = ("-c", f"import sys; sys.path.insert(1, {HOME!r}); from compare.rank import main; main()")
HEADS = ("", "ms", "ratio", "start s", "peak / reserved / device GiB", "last loss")
REASON_CHARACTERS = 300  # at most, in a table; JSON has the whole reason

Row = dict[str, Any]


@dataclass(frozen=True)
class Devices:
    """The devices and time of each peer.

    Attributes:
        ranks: number of ranks of a job.
        gpus: True if ranks train on GPUs.
        limit_s: the most time of a job, in seconds.
        rank: arguments of ``python`` for each rank. The job and the name of the file that rank 0 writes are added.
    """

    ranks: int
    gpus: bool
    limit_s: float
    rank: Sequence[str] = RANK


def compare(
    job: Job,
    names: Sequence[str],
    devices: Devices,
    say: Callable[[str], None],
    known: Sequence[Row] = (),
    keep: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Return a row for each peer, in the order of ``names``.

    Args:
        job: the training, whose ``peer`` is replaced by each name.
        names: of peers.
        devices: on which each runs.
        say: shows a line of progress.
        known: rows of an earlier call for the same job. Peers that have a time there do not run again.
        keep: called after each peer with all rows that exist, those of ``known`` included.
    """
    found_of = {row["peer"]: row for row in known if row.get("ms")}
    for name in names:
        if name in found_of:
            say(f"{name}: {found_of[name]['ms']} ms, as before")
            continue
        peer = PEERS[name]
        failed = peer.missing_requirement(devices.gpus)
        row: Row = {"peer": name, "title": peer.title}
        if not failed:
            say(f"{name} ...")
            own = replace(devices, ranks=1) if peer.alone else devices
            found, failed, output = _run(replace(job, peer=name), own)
            row |= found | ({"output": output} if failed else {})
        row["failed"] = failed
        say(f"{name}: {brief(failed) or str(row['ms']) + ' ms'}")
        found_of[name] = row
        keep(ratios([found_of[name] for name in names if name in found_of]))
    return ratios([found_of[name] for name in names])


def _run(job: Job, devices: Devices) -> tuple[Row, str, str]:
    # On the CPU ranks share the cores. A rank that runs alone gets one core, too.
    environment = {} if devices.gpus else {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        end = run_ranks([*devices.rank, job.to_json(), str(file)], devices.ranks, devices.limit_s, environment)
        found = json.loads(file.read_text()) if file.exists() else {}
    failed = end.failed or ("" if found else "rank 0 ended without a result")
    output = next((text for text, status in zip(end.outputs, end.status, strict=True) if status), end.outputs[0])
    return ({} if failed else found) | {"seconds": round(end.seconds, 1)}, failed, output


def brief(failed: str) -> str:
    """Return the last line of a reason, which says most."""
    return "".join(failed.strip().splitlines()[-1:])[:REASON_CHARACTERS]


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the ratio of their times to ours, or to the first that has a time."""
    timed = [row for row in rows if row.get("ms")]
    base = next((row for row in timed if row["peer"] == OURS), next(iter(timed), None))
    return [row | {"ratio": round(row["ms"] / base["ms"], 3) if base and row.get("ms") else None} for row in rows]


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells under ``HEADS`` of a row that has not failed."""
    memory = " / ".join(_or_dash(row[key]) for key in ("peak_gib", "reserved_gib", "device_gib"))
    ratio = _or_dash(row["ratio"])
    return row["peer"], f"{row['ms']:.1f}", ratio, f"{row['start_s']:.1f}", memory, f"{row['last_loss']:.4f}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
