"""Flat memory for shards: one tensor per dtype, pieces in the order given, nothing between them."""

import torch

from lightning_zero.sharding.flat_buffer import FlatBuffer
from lightning_zero.sharding.layout import ALIGNMENT_BYTES, ShardLayout

CPU = torch.device("cpu")


def piece(*shape: int, dtype: torch.dtype = torch.float32, world: int = 2) -> tuple[ShardLayout, torch.dtype]:
    return ShardLayout.of(torch.Size(shape), dtype, world), dtype


MIXED = [
    piece(7, 3),
    piece(100, dtype=torch.bfloat16),
    piece(0),
    piece(),
    piece(65, dtype=torch.bfloat16),
    piece(9, 40),
]


def test_pieces_of_one_dtype_are_neighbours_in_the_order_given() -> None:
    arena = FlatBuffer(MIXED, CPU)
    assert [view.dtype for view in arena.views] == [dtype for _, dtype in MIXED]
    assert [view.numel() for view in arena.views] == [layout.shard_numel for layout, _ in MIXED]
    for dtype, flat in arena.flat.items():
        position = flat.data_ptr()
        for view in (view for view in arena.views if view.dtype == dtype):
            assert view.data_ptr() == position
            assert (position - flat.data_ptr()) % ALIGNMENT_BYTES == 0
            position += view.nbytes
        assert position == flat.data_ptr() + flat.nbytes


def test_memory_starts_as_zeros_and_views_write_into_it() -> None:
    arena = FlatBuffer(MIXED, CPU)
    assert not any(flat.any() for flat in arena.flat.values())
    for number, view in enumerate(arena.views, start=1):
        view.fill_(number)
    for flat in arena.flat.values():
        expected = [n for n, v in enumerate(arena.views, start=1) if v.dtype == flat.dtype for _ in range(v.numel())]
        assert flat.tolist() == expected
    assert all(view.is_contiguous() and view.dim() == 1 for view in arena.views)


def test_it_says_how_large_it_is() -> None:
    arena = FlatBuffer([piece(2**18, world=1), piece(2**18, dtype=torch.bfloat16, world=1)], CPU)
    assert arena.nbytes == 2**20 + 2**19
    assert repr(arena) == "Arena(torch.float32: 262,144, torch.bfloat16: 262,144; 1.5 MiB)"


def test_an_arena_of_nothing_is_empty() -> None:
    arena = FlatBuffer([], CPU)
    assert (arena.flat, arena.views, arena.nbytes) == ({}, [], 0)
