"""What becomes of a job when something goes wrong on one of its ranks: it ends soon, and everybody says why.

The full list of faults runs with ``python -m tests.faults.table``.
"""

import pytest

from tests.faults.cases import CASES
from tests.faults.check import check
from tests.faults.verdict import Case

pytestmark = pytest.mark.usefixtures("native_library")

CHOSEN = [
    pytest.param(case, marks=pytest.mark.slow if case.slow else (), id=str(case))
    for case in CASES
    if case.quick or case.slow
]


@pytest.mark.parametrize("case", CHOSEN)
def test_a_job_ends_soon_and_says_why(case: Case) -> None:
    check(case)
