"""Which passes apply when, and which lists of passes are refused."""

from typing import Any

import pytest

from lightning_zero.compile.context import PassContext
from lightning_zero.compile.passes import MINIMAL_PASSES, PassSpec, default_passes
from lightning_zero.compile.passes.selection import Schedule, check_passes
from lightning_zero.config import CompileConfig

OWN = PassSpec("own", lambda graph: graph, requires=frozenset({"ordered"}))
DEFAULT = default_passes(PassContext(CompileConfig(), 2))
KNOWN = {spec.name: spec for spec in (*MINIMAL_PASSES, *DEFAULT, OWN)}
MINIMAL_NAMES = [spec.name for spec in MINIMAL_PASSES]


def test_the_built_in_lists_are_accepted() -> None:
    assert check_passes(MINIMAL_NAMES, KNOWN) == ("split_gathers", "enqueue_gradients", "publish_plan")
    check_passes([spec.name for spec in DEFAULT], KNOWN)


def test_ones_own_pass_can_stand_where_its_contract_allows() -> None:
    names = ["sink_gathers", "own", "split_gathers", "enqueue_gradients", "publish_plan"]
    assert check_passes(names, KNOWN) == tuple(names)
    with pytest.raises(ValueError, match=r"Pass 'own' requires \['ordered'\], which no earlier pass provides"):
        check_passes(["own", *MINIMAL_NAMES], KNOWN)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["prefetch"], r"There is no pass 'prefetch'\. Choose from split_gathers, .*register yours"),
        ("split_gathers", r"Passes must be a list of names, not 'split_gathers'"),
        ([1], r"Passes must be a list of names"),
        ([*MINIMAL_NAMES, "publish_plan"], r"Pass 'publish_plan' is named twice"),
        (["split_gathers"], r"not \['enqueued', 'published'\]\. Add 'enqueue_gradients', 'publish_plan'"),
        ([], r"leave a graph that is not"),
        (["sink_gathers", "split_gathers", "group_gathers", *MINIMAL_NAMES[1:]], r"conflicts with \['started'\]"),
    ],
)
def test_lists_that_cannot_run_are_refused(names: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_passes(names, KNOWN)


def test_passes_apply_from_their_step_on() -> None:
    schedule = Schedule.of([(2, MINIMAL_NAMES), (5, None)], KNOWN)
    minimal = tuple(MINIMAL_NAMES)
    assert [schedule.at(step) for step in range(7)] == [None, None, minimal, minimal, minimal, None, None]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([(-1, None)], r"The step -1 of a schedule must be a number from 0 on"),
        ([(True, None)], r"The step True"),
        ([("2", None)], r"The step '2'"),
        ([(3, None), (3, None)], r"Step 3 of a schedule comes after step 3\. Let steps grow"),
        ([(0, MINIMAL_NAMES, 1)], r"must be a pair \(step, names of passes\)"),
        ([5], r"must be a pair"),
        ([(0, None), (1, ["nothing"])], r"There is no pass 'nothing'"),
    ],
)
def test_schedules_that_cannot_run_are_refused(entries: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule.of(entries, KNOWN)


def test_nothing_scheduled_means_the_default() -> None:
    assert Schedule.of([], KNOWN).at(10) is None
