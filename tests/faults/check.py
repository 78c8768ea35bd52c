"""Run a case, and return the faults of its outcome."""

import shutil

from tests.faults.job import Outcome
from tests.faults.table import run
from tests.faults.verdict import Case, judge


def report(outcome: Outcome) -> str:
    """All that the ranks wrote since the fault."""
    lines = []
    for rank in outcome.ranks:
        lines += [f"==== rank {rank.number} {rank.state}, {rank.seconds} s after the fault", rank.text]
        lines += [rank.stacks] if not rank.over else []
    return "\n".join(lines)


def check(case: Case, forked: bool = True) -> None:
    outcome = run(case, forked)
    shutil.rmtree(outcome.home, ignore_errors=True)
    complaints = judge(case, outcome)
    assert not complaints, "\n".join([*complaints, report(outcome)])
