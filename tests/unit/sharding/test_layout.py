"""Test how a parameter is split, and the memory that a tensor spans."""

import itertools
import math

import pytest
import torch

from lightning_zero.sharding.layout import ALIGNMENT_BYTES, ShardLayout, extent, memory_order

SHAPES = [(), (0,), (4, 0, 3), (1,), (1, 1), (2,), (31,), (32,), (33,), (3, 11), (64, 1), (7, 5, 3), (1000,), (128, 96)]
WORLDS = [1, 2, 3, 4, 7, 8]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]
CASES = list(itertools.product(SHAPES, DTYPES, WORLDS))


@pytest.mark.parametrize("world", WORLDS)
def test_ranges_cover_the_parameter_once_in_memory_order(world: int) -> None:
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        layout = ShardLayout.from_shape(torch.Size(shape), dtype, world)
        covered = [i for rank in range(world) for i in range(*layout.shard_range(rank))]
        assert covered == list(range(math.prod(shape))), layout
        assert layout.numel == math.prod(shape)


@pytest.mark.parametrize("world", WORLDS)
def test_pieces_are_equal_aligned_never_empty_and_no_larger_than_needed(world: int) -> None:
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        layout = ShardLayout.from_shape(torch.Size(shape), dtype, world)
        size = layout.shard_numel * dtype.itemsize
        assert size > 0
        assert size % ALIGNMENT_BYTES == 0
        needed = math.ceil(layout.numel / world) * dtype.itemsize
        assert needed <= size < max(needed, 1) + ALIGNMENT_BYTES


@pytest.mark.parametrize("world", WORLDS)
def test_written_pieces_put_together_are_the_parameter_and_zeros(world: int) -> None:
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        full = torch.arange(1, math.prod(shape) + 1).remainder(100).to(dtype).reshape(shape)
        layout = ShardLayout.from_shape(full.shape, dtype, world)
        pieces = torch.full((world, layout.shard_numel), 77, dtype=dtype)  # stale values everywhere
        for rank in range(world):
            layout.write(pieces[rank], full, rank)
        full_view = pieces.reshape(-1)
        assert torch.equal(full_view[: full.numel()].view(shape), full)
        assert not full_view[full.numel() :].any(), f"padding of {layout} is not zero"


def test_a_parameter_of_another_layout_dtype_or_with_a_history_is_written_as_values() -> None:
    full = torch.randn(6, 4, dtype=torch.float64, requires_grad=True).t() * 2
    layout = ShardLayout.from_shape(full.shape, torch.float32, 1)
    shard = torch.full((layout.shard_numel,), torch.nan)
    layout.write(shard, full, 0)
    assert torch.equal(shard[:24].view(4, 6), full.detach().float())
    assert not shard.requires_grad


def test_the_visible_shape_keeps_the_number_of_dimensions() -> None:
    # Users split weight decay by p.ndim. A scalar's shard has more than one element, so it cannot be 0-dim.
    for shape, expected in (((), 1), ((5,), 1), ((0,), 1), ((3, 4), 2), ((2, 3, 4), 3), ((1, 1, 1, 1), 4)):
        layout = ShardLayout.from_shape(torch.Size(shape), torch.float32, 2)
        assert len(layout.visible_shape) == expected
        assert layout.visible_shape.numel() == layout.shard_numel
        assert set(layout.visible_shape[:-1]) <= {1}


def test_layouts_compare_by_value() -> None:
    first, same = (ShardLayout.from_shape(torch.Size((3, 4)), torch.float32, 2) for _ in range(2))
    assert first == same
    assert first != ShardLayout.from_shape(torch.Size((4, 3)), torch.float32, 2)
    assert first != ShardLayout.from_shape(torch.Size((3, 4)), torch.float32, 3)


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (8, 4, 1, 1), (8, 1, 3, 3), (8, 1, 1, 1), (1, 4, 3, 3)])
def test_a_channels_last_parameter_is_cut_as_it_lies_in_memory(shape: tuple[int, ...]) -> None:
    full = torch.arange(1.0, 1 + math.prod(shape)).view(shape).to(memory_format=torch.channels_last)
    layout = ShardLayout.from_shape(full.shape, full.dtype, 2, memory_order(full))
    shards = [torch.full((layout.shard_numel,), math.nan) for _ in range(2)]
    for rank, shard in enumerate(shards):
        layout.write(shard, full, rank)
    full_view = layout.full_view(torch.cat(shards))
    assert torch.equal(full_view, full)
    assert full_view.stride() == full.stride()
    # For any strides of the source.
    layout.write(shards[0], full.contiguous(), 0)
    assert torch.equal(layout.full_view(torch.cat(shards)), full)


def test_other_strides_are_not_kept() -> None:
    assert memory_order(torch.zeros(8, 4, 3, 3)) is None
    assert memory_order(torch.zeros(8, 4).t()) is None
    assert memory_order(torch.zeros(8, 4, 3, 6)[..., ::2].transpose(1, 2)) is None
    assert memory_order(torch.zeros(1, 1, 3, 3).expand(8, 4, 3, 3)) is None


BASE = torch.arange(60).view(3, 4, 5)
TENSORS = {
    "plain": BASE,
    "transposed": BASE.permute(2, 0, 1),
    "with gaps": BASE[::2, 1:3, ::4],
    "expanded": BASE[:, :1].expand(3, 9, 5),
    "one element": BASE[1, 1, 1],
    "empty": BASE[:, :0],
}


@pytest.mark.parametrize("name", TENSORS)
def test_it_is_as_far_as_the_last_element(name: str) -> None:
    tensor = TENSORS[name]
    first = tensor.storage_offset()
    last = max((int(value) for value in tensor.flatten()), default=first - 1)  # values are their positions
    assert extent(tensor.size(), tensor.stride()) == last + 1 - first
