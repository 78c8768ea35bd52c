"""A captured step writes the copies in the compute dtype. Whatever else changes weights must still reach them."""

import pytest

from tests.helpers.written_copies import (
    EDITS,
    WAYS,
    Edit,
    clamp_data,
    load_other_values,
    train,
    write_in_later_hooks,
)
from tests.ranks.pool import Ranks


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("way", ["gradients in their own memory", "gradients over copies"])
def test_edits_between_steps_reach_the_copies(ranks: Ranks, way: str, edit: Edit) -> None:
    [found] = ranks.run(1, train, edit, WAYS[way], deadline=120)
    assert not found["wrong"]


@pytest.mark.parametrize("way", WAYS)
def test_steps_write_the_copies_and_nothing_else_does(ranks: Ranks, way: str) -> None:
    [found] = ranks.run(1, train, None, WAYS[way], clip=None if way == "float16" else 0.5, deadline=120)
    assert not found["wrong"]
    assert found["passes"][0] > 0
    assert not any(found["passes"][3:]), found["passes"]


@pytest.mark.parametrize("way", ["gradients in their own memory", "gradients over copies"])
def test_each_of_two_optimizers_writes_its_part(ranks: Ranks, way: str) -> None:
    [found] = ranks.run(1, train, None, WAYS[way], groups=2, deadline=120)
    assert not found["wrong"]


@pytest.mark.parametrize("transport", ["collective", "copy"])
def test_two_ranks_write_their_copies(ranks: Ranks, transport: str) -> None:
    for found in ranks.run(2, train, None, {"gather_transport": transport}, deadline=120):
        assert not found["wrong"]
        assert not any(found["passes"][3:]), found["passes"]


@pytest.mark.parametrize("edit", [clamp_data, load_other_values, write_in_later_hooks], ids=lambda e: e.__name__)
def test_edits_reach_copies_that_peers_read(ranks: Ranks, edit: Edit) -> None:
    options = {"gather_transport": "copy", "reduce_transport": "copy", "grad_aliasing": True}
    for found in ranks.run(2, train, edit, options, deadline=120):
        assert not found["wrong"]
