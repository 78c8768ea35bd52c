"""What becomes of a job when something goes wrong on one of its ranks: it ends soon, and everybody says why.

The full list of faults runs with ``python -m tests.faults.table``.
"""

import shutil

import pytest

from tests.faults.cases import CASES
from tests.faults.job import Outcome
from tests.faults.table import run
from tests.faults.verdict import Case, judge

pytestmark = pytest.mark.usefixtures("native_library")


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


CHOSEN = [
    pytest.param(case, marks=pytest.mark.slow if case.slow else (), id=str(case))
    for case in CASES
    if case.quick or case.slow
]


@pytest.mark.parametrize("case", CHOSEN)
def test_a_job_ends_soon_and_says_why(case: Case) -> None:
    check(case)
