"""A job ends soon after a fault on one of its ranks, and every rank reports the reason.

The full list of faults runs with ``python -m tests.faults.table``.
"""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.faults.cases import CASES
from tests.faults.check import check
from tests.faults.verdict import Case
from tests.helpers.beside import beside

CHOSEN = [
    pytest.param(case, marks=pytest.mark.slow if case.slow else (), id=str(case))
    for case in CASES
    if case.quick or case.slow
]


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest, native_library: None) -> Iterator[Callable[[str], None]]:
    """Return the faults that :func:`check` finds in a case, by its name, for those to be tested."""
    cases = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    with beside({str(case): partial(check, case) for case in cases}) as outcome:
        yield outcome


@pytest.mark.parametrize("case", CHOSEN)
@pytest.mark.exhaustive_variants("*started by Lightning", "*replicate_over=hosts")
def test_a_job_ends_soon_and_says_why(case: Case, checked: Callable[[str], None]) -> None:
    checked(str(case))
