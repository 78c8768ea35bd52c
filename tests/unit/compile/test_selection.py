"""Which passes are in use: chosen, registered, switched off."""

import pytest

from lightning_zero.compile.context import PassContext
from lightning_zero.compile.passes import MINIMAL_PASSES, PassSpec, default_passes
from lightning_zero.compile.passes.selection import PassSelection
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


def test_a_choice_that_cannot_run_without_what_is_switched_off_is_refused() -> None:
    selection = PassSelection()
    selection.disable(["split_gathers"], DEFAULT)  # no default pass here
    with pytest.raises(ValueError, match=r"cannot do without 'split_gathers'"):
        selection.use(MINIMAL, DEFAULT)
    assert names(selection) == NAMES
    # With other options it is.
    with pytest.raises(ValueError, match=r"cannot do without 'split_gathers'"):
        selection.check(MINIMAL_PASSES)
