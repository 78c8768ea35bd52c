"""Runs of equal parts in a sequence."""

import pytest

from lightning_zero.compile.subgraphs.repeats import RepeatedRun, find_repeats

LAYER = [f"op{i}" for i in range(20)]
OTHER = [f"other{i}" for i in range(22)]


@pytest.mark.parametrize(
    ("items", "runs"),
    [
        (["in", *LAYER * 5, "loss"], [RepeatedRun(1, 101, 20)]),
        ([*LAYER * 4, *LAYER[:7], "loss"], [RepeatedRun(0, 87, 20)]),  # the last one is incomplete
        (["a", *LAYER * 3, "b", *LAYER[:8] * 4, "c"], [RepeatedRun(1, 61, 20), RepeatedRun(62, 94, 8)]),
        ([*(LAYER + LAYER[3:9]) * 3], [RepeatedRun(0, 78, 26)]),  # alternating layers
        (
            ([*LAYER * 5, *OTHER]) * 2,
            [RepeatedRun(0, 100, 20), RepeatedRun(122, 222, 20)],
        ),  # five layers of one kind, then one of another
        (([*LAYER[:6] * 2, *OTHER]) * 3, [RepeatedRun(0, 102, 34)]),  # most of the group repeats only as a whole
        (list("abcabcabc"), []),  # too short a period
        (LAYER * 2, [RepeatedRun(0, 40, 20)]),
        (LAYER * 2 + LAYER[:5], [RepeatedRun(0, 45, 20)]),
        (
            ["a", *LAYER[:8] * 3, "b", *LAYER * 3],
            [RepeatedRun(1, 25, 8), RepeatedRun(26, 86, 20)],
        ),  # the longer one is later
        ([*LAYER[:7], *"abc", *LAYER[:7], *"def"], []),  # nothing complete
        (list("abcdef") * 2, [RepeatedRun(0, 12, 6)]),  # just long enough
        (LAYER, []),
        ([], []),
        ([*LAYER, "x", *LAYER], [RepeatedRun(0, 41, 21)][:0]),  # far apart, and only once each
    ],
)
def test_finds_what_repeats(items: list[str], runs: list[RepeatedRun]) -> None:
    assert find_repeats(items, shortest=6) == runs


def test_counts_whole_repetitions() -> None:
    assert RepeatedRun(3, 30, 10).repetitions == 2
