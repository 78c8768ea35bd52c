"""Memory for weights that peers copy, and what happens where there is not enough."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from lightning_zero.config import EngineConfig, Tuning
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.symm_mem.weights import WeightTransport

MIXED = EngineConfig(compute_dtype=torch.bfloat16)
SIZES = {torch.float32: 64, torch.bfloat16: 32}


class Memory:
    """Of two ranks; what was there before is not zero."""

    all_or_nothing = staticmethod(nullcontext)

    def __init__(self, enough: bool = True) -> None:
        self.enough = enough

    def empty(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        if not self.enough:
            raise UnsupportedError("there is no more")
        mine = torch.full((numel,), 7, dtype=dtype)
        return mine, [mine, mine.clone()]


def way_with(memory: Memory | None, choice: Any = "auto") -> WeightTransport:
    config = replace(MIXED, tuning=Tuning(gather_transport=choice))
    way = WeightTransport(config, MagicMock(world_size=2, rank=0, device=torch.device("cpu"), inter_host=None, inter_host_shard_group=None))
    way.use(memory, "")  # type: ignore[arg-type]
    return way


def executor(uses_epoch_lock: bool) -> Any:
    found = MagicMock()
    found.weights.uses_epoch_lock.return_value = uses_epoch_lock
    return found


def test_shards_lie_where_peers_see_them_and_begin_as_zeros() -> None:
    memory, turns = Memory(), MagicMock()
    own = executor(uses_epoch_lock=False)
    found = way_with(memory).allocate_shards(own, SIZES, turns)
    assert {dtype: mine.numel() for dtype, (mine, _) in found.items()} == SIZES
    for dtype, (mine, everywhere) in found.items():
        assert not mine.any()
        assert everywhere[0] is mine
        assert everywhere[1].dtype is dtype
    turns.assert_called_once_with(own, memory)


def test_ranks_that_take_turns_already_go_on_with_that() -> None:
    turns = MagicMock()
    assert way_with(Memory()).allocate_shards(executor(uses_epoch_lock=True), SIZES, turns)
    turns.assert_not_called()


def test_without_memory_of_peers_shards_have_memory_of_their_own() -> None:
    turns = MagicMock()
    assert way_with(None).allocate_shards(executor(False), SIZES, turns) == {}
    turns.assert_not_called()


@pytest.mark.parametrize("turns", [None, UnsupportedError("no kernels")])
def test_where_there_is_not_enough_for_shards_collectives_take_over(turns: Any) -> None:
    way = way_with(Memory(enough=turns is not None))
    assert way.allocate_shards(executor(False), SIZES, MagicMock(side_effect=turns)) == {}
    assert way.memory is None
    with pytest.raises(UnsupportedError, match=r"gather_transport='copy' is impossible here: there is no more"):
        way_with(Memory(enough=False), "copy").allocate_shards(executor(False), SIZES, MagicMock())


def test_compute_copies_lie_with_peers_where_there_is_room() -> None:
    memory, given = Memory(), []
    way = way_with(memory)
    way.allocate_compute_shards(executor(False), given.append)
    assert given == [memory]
    assert way.memory is memory  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("uses_epoch_lock", [False, True])
def test_without_room_copies_are_gathered_unless_shards_can_be_read(uses_epoch_lock: bool) -> None:
    given, way = [], way_with(Memory())

    def allocate(peers: Any) -> None:
        given.append(peers)
        if peers is not None:
            raise UnsupportedError("there is no more")

    memory = way.memory
    way.allocate_compute_shards(executor(uses_epoch_lock), allocate)
    assert given == ([memory] if uses_epoch_lock else [memory, None])
    assert way.memory is (memory if uses_epoch_lock else None)


def test_where_collectives_move_weights_copies_have_memory_of_their_own() -> None:
    given: list[Any] = []
    way_with(None).allocate_compute_shards(executor(False), given.append)
    assert given == [None]
