"""Memory of the host that is lent, and used again once nobody holds it."""

import gc

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import HostMemoryError
from lightning_zero.offload.blocks import SPARE, UNIT, ReservedBlocks, HostBlocks

CPU = torch.device("cpu")


class Memory:
    """Notes what it gives."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.given: list[int] = []
        self.limit = limit

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        if len(self.given) >= self.limit:
            raise HostMemoryError("no more")
        self.given.append(numel)
        return torch.empty(numel, dtype=dtype)


def blocks_of(limit: float = float("inf")) -> tuple[HostBlocks, Memory]:
    memory = Memory(limit)
    return HostBlocks(CPU, memory), memory  # type: ignore[arg-type]


def test_what_nobody_holds_is_lent_again_and_what_a_view_holds_is_not() -> None:
    blocks, memory = blocks_of()
    first = blocks.take(1000)
    place, view = first.data_ptr(), first.view(torch.float32)[3:].unsqueeze(0)
    assert first.shape == (1000,)
    del first
    second = blocks.take(1000)
    assert second.data_ptr() != place, "a view of it is still there"
    del view
    third = blocks.take(999)
    assert third.data_ptr() == place
    assert memory.given == [UNIT, UNIT]
    assert blocks.nbytes == 2 * UNIT


def test_what_is_saved_for_a_backward_that_never_comes_is_free_with_its_graph() -> None:
    blocks, memory = blocks_of()

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(blocks.take(64).view(torch.float32))
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad * ctx.saved_tensors[0].sum()

    for _ in range(3):
        loss = Keeps.apply(torch.ones(2, requires_grad=True)).sum()
        del loss
    gc.collect()
    assert memory.given == [UNIT]


def test_the_smallest_that_fits_is_taken_and_none_that_is_much_too_large() -> None:
    blocks, memory = blocks_of()
    sizes = [64 * UNIT, 66 * UNIT, 100 * UNIT]
    lent = [blocks.take(size) for size in sizes]
    places = [block.data_ptr() for block in lent]
    lent.clear()
    assert blocks.take(65 * UNIT).data_ptr() == places[1]
    assert blocks.take(63 * UNIT).data_ptr() == places[0]
    blocks.take(50 * UNIT)
    assert memory.given == [*sizes, 50 * UNIT]


def test_sizes_that_do_not_come_any_more_are_given_back() -> None:
    blocks, memory = blocks_of()
    for _ in range(3):
        for size in (7, 1, 4, 2, 8, 3):
            blocks.take(size * 100 * UNIT)
            assert blocks.nbytes <= 800 * UNIT * (1 + 1 / SPARE)
    assert len(memory.given) > 6
    blocks.give_back()
    assert blocks.nbytes == 0


def test_where_the_host_has_no_more_what_is_free_is_given_back_first() -> None:
    blocks, memory = blocks_of(limit=2)
    held = blocks.take(1000)
    blocks.take(50 * UNIT)
    with pytest.raises(HostMemoryError):
        blocks.take(100 * UNIT)
    assert blocks.nbytes == UNIT
    memory.limit = 3
    blocks.take(100 * UNIT)
    assert held.shape == (1000,)


def test_what_graphs_hold_stays_theirs_and_the_next_graph_that_holds_it_uses_it_again() -> None:
    blocks, memory = blocks_of()
    held = ReservedBlocks()
    with blocks.holding(held):
        places = [blocks.take(n * UNIT).data_ptr() for n in (1, 1, 9)]
    assert len(set(places)) == 3
    outside = blocks.take(UNIT)
    assert outside.data_ptr() not in places
    with blocks.holding(held):
        assert [blocks.take(n * UNIT).data_ptr() for n in (9, 1, 1)] == [places[2], *places[:2]]
        fourth = blocks.take(UNIT).data_ptr()
    assert fourth not in (*places, outside.data_ptr())
    made = len(memory.given)
    del held
    assert {blocks.take(n * UNIT).data_ptr() for n in (9,)} == {places[2]}
    assert len(memory.given) == made
