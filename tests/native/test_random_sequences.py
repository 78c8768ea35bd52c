"""Compare the executor with plain tensors in many short random sequences, see sequences.py."""

import pytest

from tests.native.sequences import run_sequences
from tests.ranks.pool import Ranks

SEQUENCES = {1: 400, 2: 200, 3: 160}


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.exhaustive), 2, pytest.param(3, marks=pytest.mark.slow)],
    ids="W={}".format,
)
@pytest.mark.exhaustive_variants("W=3")
def test_random_sequences_equal_plain_tensors(ranks: Ranks, world_size: int) -> None:
    first = 10_000 * world_size
    results = ranks.run(world_size, run_sequences, range(first, first + SEQUENCES[world_size]), deadline=180)
    complaints = [complaint for found, _ in results for complaint in found]
    if complaints:
        pytest.fail(f"{len(complaints)} complaints, the first of them:\n" + "\n".join(complaints[:4]))
    # The sequences reached all code paths.
    totals = results[0][1]
    visited = [
        "gather_groups",
        "eager_gathers",
        "reduces",
        "flushes",
        "late_flushes",
        "grown_buckets",
        "aborted_backwards",
    ]
    visited += ["compute_shard_writes"]
    totals["late_flushes"] *= 4  # rare
    assert not {what: totals.get(what, 0) for what in visited if totals.get(what, 0) < 15}
