"""``python -m tests.faults.table`` runs the cases, prints a Markdown table, and fails if any is not as expected."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tests.faults.cases import CASES, GPU_CASES
from tests.faults.job import START_S, Job, NeverReached, Outcome
from tests.faults.spec import Training
from tests.faults.verdict import Case, about, judge, watch

__all__ = ["attempt", "checkpoint", "run"]

HEAD = ("fault", "how each rank ended", "what each rank printed", "named after", "job ended after", "verdict")


def checkpoint(device: str = "cpu", forked: bool = False) -> Outcome:
    """A training without a fault, whose ``home`` holds ``last.ckpt``."""
    with Job(Training(steps=2, device=device), forked=forked) as job:
        outcome = job.run(limit_s=START_S)
    bad = [rank for rank in outcome.ranks if rank.code != 0]
    assert not bad, "\n".join(f"rank {rank.number} {rank.state}\n{rank.text}" for rank in bad)
    return outcome


def run(
    case: Case, forked: bool, resumed: str = "", start_s: float = START_S, running: set[Job] | None = None
) -> Outcome:
    """The caller deletes the outcome's ``home``. ``running``: holds the job while it runs.

    Raises:
        NeverReached: see :meth:`Job.run`.
    """
    with Job(case.training, case.fault, case.world, case.how, forked, resumed, case.meanwhile) as job:
        watch(case, job.ranks)
        running = set() if running is None else running
        running.add(job)
        try:
            return job.run(case.limit_s, start_s)
        finally:
            running.discard(job)


def attempt(
    case: Case, forked: bool, resumed: str = "", running: set[Job] | None = None
) -> tuple[Outcome | None, list[str]]:
    """Return the outcome, and its faults."""
    try:
        outcome = run(case, forked, resumed, running=running)
    except NeverReached as error:
        return None, [str(error)]
    return outcome, judge(case, outcome)


def cell(text: str, most: int = 160) -> str:
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= most else f"{text[:most]}..."


def row(case: Case, outcome: Outcome | None, complaints: Sequence[str]) -> str:
    verdict = "; ".join(line.splitlines()[0] for line in complaints) or "ok"
    if outcome is None:
        return f"| {case} | | | | | {cell(verdict, 400)} |"
    ends = [r.state if r.seconds is None else f"{r.state}, {r.seconds:.1f} s" for r in outcome.ranks]
    lines = [cell(about(rank, case)) or "(nothing)" for rank in outcome.ranks]
    ended, printed = ("<br>".join(f"{rank}: {line}" for rank, line in enumerate(column)) for column in (ends, lines))
    named = [s for rank in outcome.ranks for name, s in rank.at.items() if name.startswith("names")]
    names = f"{max(named):.1f} s" if len(named) >= len(case.survivors) > 0 else ""
    seconds = "killed" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
    return f"| {case} | {ended} | {printed} | {names} | {seconds} | {cell(verdict, 400)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.table", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: two GPUs; four where hosts are told apart"
    )
    parser.add_argument("--repeat", type=int, default=1, help="runs of each case")
    parser.add_argument(
        "--only", action="append", default=[], help="cases whose name has this in it; or that, where it is repeated"
    )
    parser.add_argument("--quick", action="store_true", help="only what pytest always runs")
    parser.add_argument("--forked", action="store_true", help="fork ranks from a process that has imported everything")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on all limits, where cores are scarce")
    parser.add_argument("--list", action="store_true", help="print the names only")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, where cores are plenty; none is forked")
    parser.add_argument("--keep", type=Path, help="folder for what the ranks of bad cases wrote")
    chosen = parser.parse_args(arguments)
    cases = GPU_CASES if chosen.device == "cuda" else CASES
    cases = tuple(
        replace(c, limit_s=c.limit_s * chosen.patience)
        for c in cases
        if (c.quick or not chosen.quick) and (not chosen.only or any(part in str(c) for part in chosen.only))
    )
    forked = (
        chosen.forked and chosen.jobs == 1 and chosen.device == "cpu"
    )  # a process that has used CUDA cannot be forked
    if chosen.list:
        print("\n".join(map(str, cases)))
        return 0
    resumed = checkpoint(chosen.device, forked).home if any(case.training.resume for case in cases) else None

    running: set[Job] = set()

    def look(number: int, case: Case, turn: int) -> tuple[str, bool]:
        outcome, complaints = attempt(case, forked, str(resumed / "last.ckpt") if resumed else "", running)
        if outcome is None and chosen.keep:
            (chosen.keep / f"{number}-{turn}.txt").write_text("\n".join(complaints))
        if outcome is not None:
            if complaints and chosen.keep:
                shutil.copytree(outcome.home, chosen.keep / f"{number}-{turn}", dirs_exist_ok=True)
            shutil.rmtree(outcome.home, ignore_errors=True)
        return row(case, outcome, complaints), bool(complaints)

    bad = 0
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    tries = [(number, case, turn) for number, case in enumerate(cases) for turn in range(chosen.repeat)]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        try:
            for text, failed in pool.map(lambda each: look(*each), tries):
                print(text, flush=True)
                bad += failed
        except BaseException:  # a SIGTERM: the pool would wait for running jobs, and ranks would outlive a SIGKILL
            pool.shutdown(wait=False, cancel_futures=True)
            for job in list(running):
                job.kill()
            raise
    if resumed is not None:
        shutil.rmtree(resumed, ignore_errors=True)
    print(f"\n{bad} of {len(tries)} not as expected.", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or ranks would outlive it
    sys.exit(main())
