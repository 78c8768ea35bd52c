"""Runs of equal parts in a sequence."""

import pytest

from lightning_zero.compile.pieces.repeats import Run, find_runs

LAYER = [f"op{i}" for i in range(20)]


@pytest.mark.parametrize(
    ("items", "runs"),
    [
        (["in", *LAYER * 5, "loss"], [Run(1, 101, 20)]),
        ([*LAYER * 4, *LAYER[:7], "loss"], [Run(0, 87, 20)]),  # the last one is cut short
        (["a", *LAYER * 3, "b", *LAYER[:8] * 4, "c"], [Run(1, 61, 20), Run(62, 94, 8)]),
        ([*(LAYER + LAYER[3:9]) * 3], [Run(0, 78, 26)]),  # alternating layers
        (list("abcabcabc"), []),  # too short a period
        (LAYER, []),
        ([], []),
        ([*LAYER, "x", *LAYER], [Run(0, 41, 21)][:0]),  # far apart, and only once each
    ],
)
def test_finds_what_repeats(items: list[str], runs: list[Run]) -> None:
    assert find_runs(items, shortest=6) == runs


def test_counts_whole_repetitions() -> None:
    assert Run(3, 30, 10).repetitions == 2
