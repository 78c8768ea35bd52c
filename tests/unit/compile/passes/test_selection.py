"""Test which passes are used: chosen, registered, disabled and scheduled ones."""

from typing import Any

import pytest

from lightning_zero.compile.context import PassContext
from lightning_zero.compile.passes import MINIMAL_PASSES, PassSpec, default_passes
from lightning_zero.compile.passes.selection import PassSelection, Schedule, check_passes
from lightning_zero.config import CompileConfig

DEFAULT = default_passes(PassContext(CompileConfig(), 2))


NAMES = [spec.name for spec in DEFAULT]
MINIMAL = [spec.name for spec in MINIMAL_PASSES]
OWN = PassSpec("own", lambda graph: graph, version="1")


def names(selection: PassSelection, default: tuple[PassSpec, ...] = DEFAULT) -> list[str]:
    return [spec.name for spec in selection.passes(default)]


def test_the_default_ones_unless_somebody_chooses() -> None:
    selection = PassSelection()
    assert names(selection) == NAMES
    assert selection.use(MINIMAL, DEFAULT)
    assert names(selection) == MINIMAL
    assert not selection.use(MINIMAL, DEFAULT), "nothing has changed"
    assert selection.use(None, DEFAULT)
    assert names(selection) == NAMES


def test_a_pass_of_ones_own_is_known_once_it_is_registered() -> None:
    selection = PassSelection()
    with pytest.raises(ValueError, match=r"There is no pass 'own'"):
        selection.use(["own", *MINIMAL], DEFAULT)
    selection.register(OWN, DEFAULT)
    selection.register(OWN, DEFAULT)  # the same again
    assert selection.use(["own", *MINIMAL], DEFAULT)
    assert names(selection) == ["own", *MINIMAL]
    with pytest.raises(ValueError, match=r"There is a pass named 'own' already"):
        selection.register(PassSpec("own", lambda graph: graph), DEFAULT)


def test_only_passes_without_a_version_keep_graphs_out_of_caches() -> None:
    selection = PassSelection()
    selection.register(OWN, DEFAULT)
    assert selection.unversioned == set()
    selection.register(PassSpec("changing", lambda graph: graph), DEFAULT)
    assert selection.unversioned == {"changing"}


def test_a_pass_that_is_switched_off_is_left_out_of_whatever_is_chosen() -> None:
    selection = PassSelection()
    key = selection.key
    assert selection.disable(["merge_reduces", "group_reduces"], DEFAULT)
    assert selection.key != key
    assert names(selection) == [name for name in NAMES if name not in ("merge_reduces", "group_reduces")]
    selection.use(["sink_gathers", "merge_reduces", *MINIMAL], DEFAULT)
    assert names(selection) == ["sink_gathers", *MINIMAL]
    assert not selection.disable(["group_reduces", "merge_reduces"], DEFAULT), "nothing has changed"
    assert selection.disable([], DEFAULT)
    assert names(selection) == ["sink_gathers", "merge_reduces", *MINIMAL]


@pytest.mark.parametrize(
    ("off", "words"),
    [
        (["nothing"], r"There is no pass 'nothing'"),
        ("merge_reduces", r"Passes must be a list of names"),
        (["sink_gathers"], r"cannot do without 'sink_gathers': Pass 'share_gathers' requires \['ordered'\]"),
        (["publish_plan"], r"cannot do without 'publish_plan': .* not \['published'\]\. Add 'publish_plan'"),
        (["group_gathers", "fuse_casts"], r"cannot do without 'fuse_casts', 'group_gathers': .*requires \['started'\]"),
    ],
)
def test_what_graphs_need_stays_on(off: list[str], words: str) -> None:
    selection = PassSelection()
    with pytest.raises(ValueError, match=words):
        selection.disable(off, DEFAULT)
    assert names(selection) == NAMES


def test_gradients_follow_the_reads_of_a_graph_that_reads_weights_in_place() -> None:
    alone, passes = default_passes(PassContext(CompileConfig(), 1)), PassSelection()
    with pytest.raises(ValueError, match="Graphs cannot do without 'reduce_after_reads'"):
        passes.disable(["reduce_after_reads"], alone)
    names = [spec.name for spec in alone]
    names.append(names.pop(names.index("read_in_place")))
    with pytest.raises(ValueError, match="'read_in_place' conflicts with"):
        passes.use(names, alone)
    assert passes.disable(["read_in_place"], alone)


def test_a_choice_that_cannot_run_without_what_is_switched_off_is_refused() -> None:
    selection = PassSelection()
    selection.disable(["split_gathers"], DEFAULT)  # not a default pass here
    with pytest.raises(ValueError, match=r"cannot do without 'split_gathers'"):
        selection.use(MINIMAL, DEFAULT)
    assert names(selection) == NAMES
    # With other options it is.
    with pytest.raises(ValueError, match=r"cannot do without 'split_gathers'"):
        selection.check(MINIMAL_PASSES)


ORDERED = PassSpec("own", lambda graph: graph, requires=frozenset({"ordered"}))
KNOWN = {spec.name: spec for spec in (*MINIMAL_PASSES, *DEFAULT, ORDERED)}
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
