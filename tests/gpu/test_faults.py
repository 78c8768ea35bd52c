"""Faults of the device, and on ranks whose others wait on the device, which no host sees.

See tests/faults.
"""

import pytest

from tests.faults.cases import GPU_CASES
from tests.faults.check import check
from tests.faults.verdict import Case

pytestmark = [pytest.mark.gpu(2, apart=True), pytest.mark.usefixtures("native_library")]


@pytest.mark.parametrize("case", [case for case in GPU_CASES if case.quick], ids=str)
def test_a_job_ends_soon_and_says_why(case: Case) -> None:
    check(case, forked=False)  # a process that has used CUDA cannot be forked
