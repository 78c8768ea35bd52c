"""Tensors that are whole only in a checkpoint."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from lightning_zero.checkpoint.sharded import checkpoint_tensors as module
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointShard, CheckpointTensor
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.layout import ShardLayout, memory_order

SHAPES = [(), (5,), (7, 5), (130, 3, 2), (8, 4, 3, 3), (0, 4)]


def _whole(shape: tuple[int, ...], channels_last: bool = False) -> torch.Tensor:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return values.to(memory_format=torch.channels_last) if channels_last else values


CASES = [_whole(shape) for shape in SHAPES] + [_whole((8, 4, 3, 3), channels_last=True)]


def _saved(whole: torch.Tensor, writers: int, most: int, read: list[Box]) -> CheckpointTensor:
    """Return a tensor as it is stored in a checkpoint of several ranks."""
    layout = ShardLayout.from_shape(whole.shape, whole.dtype, writers, memory_order(whole))
    chunks = []
    for rank in range(writers):
        for box, values in CheckpointShard(layout, layout.part(whole, rank), rank).parts(most):

            def load(box: Box = box, values: torch.Tensor = values) -> torch.Tensor:
                read.append(box)
                return values

            chunks.append((box, load))
    return CheckpointTensor("w", whole.shape, whole.dtype, chunks)


@pytest.mark.parametrize("whole", CASES, ids=lambda value: f"{tuple(value.shape)}{value.stride()}")
@pytest.mark.parametrize("most", [10, 1 << 20])
def test_any_number_of_ranks_reads_what_any_number_has_written(whole: torch.Tensor, most: int) -> None:
    for writers in (1, 2, 3):
        saved = _saved(whole, writers, most, [])
        assert torch.equal(saved.full_tensor(), whole)
        for readers in (1, 2, 5):
            layout = ShardLayout.from_shape(whole.shape, whole.dtype, readers, memory_order(whole))
            for rank in range(readers):
                assert torch.equal(layout.part(saved, rank), layout.part(whole, rank)), (writers, readers, rank)


@pytest.mark.parametrize("whole", CASES, ids=lambda value: f"{tuple(value.shape)}{value.stride()}")
@pytest.mark.parametrize("shared_bytes", [0, 40, 1 << 20])
def test_replicas_write_each_element_once(
    whole: torch.Tensor, shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_SHARED_BYTES", shared_bytes)
    layout = ShardLayout.from_shape(whole.shape, whole.dtype, 2, memory_order(whole))
    found, times = torch.full(whole.shape, torch.nan), torch.zeros(whole.shape)
    everything = Box((0,) * whole.dim(), tuple(whole.shape))
    writers: dict[int, int] = {}
    for rank in range(6):
        number, replica = rank % 2, rank // 2
        for box, part in CheckpointShard(layout, layout.part(whole, number), number, (replica, 3)).parts(7):
            found[box.within(everything)] = part
            times[box.within(everything)] += 1
            writers[replica] = writers.get(replica, 0) + box.numel
    assert torch.equal(found, whole)
    assert bool((times == 1).all())
    small = whole.numel() * whole.itemsize <= shared_bytes
    assert set(writers) == ({0} if small else {0, 1, 2}) or whole.numel() < 6


def test_no_more_is_read_than_what_holds_the_part() -> None:
    whole = _whole((130, 32))
    read: list[Box] = []
    saved = _saved(whole, 2, 10 * 32, read)
    layout = ShardLayout.from_shape(whole.shape, whole.dtype, 4)
    layout.part(saved, 1)
    begin, end = layout.shard_range(1)
    assert sum(box.numel for box in read) <= end - begin + 2 * 10 * 32
    assert len(read) == len(set(read))


def test_another_dtype_is_converted() -> None:
    saved = _saved(_whole((7, 5)), 2, 100, [])
    layout = ShardLayout.from_shape(saved.shape, torch.bfloat16, 2)
    shard = torch.empty(layout.shard_numel, dtype=torch.bfloat16)
    layout.write(shard, saved, 0)
    assert torch.equal(shard[:35], _whole((7, 5)).flatten().bfloat16()[: layout.shard_numel])


def test_hooks_may_compute_with_what_was_saved() -> None:
    whole = _whole((7, 5))
    saved = _saved(whole, 2, 10, [])
    assert torch.equal(saved[:3] * 2, whole[:3] * 2)
    assert all(type(value) is torch.Tensor for value in (saved * 2, saved.clone(), saved[0], saved.t()))
    assert torch.equal(torch.cat([saved, torch.zeros(1, 5)]), torch.cat([whole, torch.zeros(1, 5)]))
    target = torch.zeros(7, 5)
    target.copy_(saved)
    assert torch.equal(target, whole)
    assert torch.nn.Parameter(torch.empty(7, 5)).data.copy_(saved).sum() == whole.sum()
    assert repr(saved) == "CheckpointTensor('w', (7, 5), torch.float32)"


def _edits() -> dict[str, Callable[[torch.Tensor], object]]:
    return {
        "in place": lambda value: value.mul_(2),
        "a result": lambda value: torch.add(torch.ones(7, 5), 1, out=value),
        "one row": lambda value: value.__setitem__(2, 9.0),
        "one number": lambda value: value[1:].view(-1)[3].fill_(9.0),
        "several": lambda value: torch._foreach_add_([value, torch.zeros(1)], 1.0),
        "by a mask": lambda value: value.masked_fill_(value > 7, 0.0),
    }


@pytest.mark.parametrize("name", list(_edits()))
def test_an_edit_stays(name: str) -> None:
    """Also one of a view, which would go with the copy that torch has made for it."""
    whole, edit = _whole((7, 5)), _edits()[name]
    saved = _saved(whole, 2, 10, [])
    edit(saved)
    edit(whole)
    assert not torch.equal(whole, _whole((7, 5)))
    assert torch.equal(saved.full_tensor(), whole)
    assert torch.equal(saved + 0, whole)
    layout = ShardLayout.from_shape(whole.shape, whole.dtype, 2)
    assert torch.equal(layout.part(saved, 1), layout.part(whole, 1))


def test_what_is_only_read_is_not_kept() -> None:
    read: list[Box] = []
    saved = _saved(_whole((7, 5)), 2, 1000, read)
    torch.zeros(7, 5).copy_(saved)
    (saved * 2).sum()
    assert saved.held is None
    assert len(read) == 2 * len(saved.chunks)


@pytest.mark.parametrize(
    "taken",
    [
        copy.deepcopy,
        lambda value: copy.deepcopy({"a": value})["a"],
        lambda value: pickle.loads(pickle.dumps(value)),
        lambda value: torch.tensor(value.tolist()),
        lambda value: torch.from_numpy(value.numpy()),
    ],
    ids=["deepcopy", "deepcopy of a dict", "pickle", "tolist", "numpy"],
)
def test_what_torch_does_not_do_for_subclasses(taken: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = taken(_saved(_whole((7, 5)), 2, 10, []))
    assert type(found) is torch.Tensor
    assert torch.equal(found, _whole((7, 5)))


def test_nobody_computes_with_a_part_that_looks_whole() -> None:
    layout = ShardLayout.from_shape(torch.Size((7, 5)), torch.float32, 2)
    part = CheckpointShard(layout, torch.zeros(layout.shard_numel), 1)
    assert part.shape == (7, 5)
    assert part.detach() is part
    with pytest.raises(UnsupportedError, match=r"about to be saved.*full_parameters.*state_dict_type='full'"):
        part * 2
