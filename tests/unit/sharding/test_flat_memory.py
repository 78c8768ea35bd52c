"""Test flat buffers, and the memory of shards by role: who has which, and the executor's view of it."""

import math
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.sharding.flat_memory import FlatBuffer, HostMasterPolicy, ShardMemory
from lightning_zero.sharding.layout import ALIGNMENT_BYTES, ShardLayout
from lightning_zero.sharding.module_patching import UNSHARDED_CACHE
from lightning_zero.sharding.param_record import Records, Role, ShardedParameter

CPU = torch.device("cpu")


def piece(*shape: int, dtype: torch.dtype = torch.float32, world: int = 2) -> tuple[ShardLayout, torch.dtype]:
    return ShardLayout.from_shape(torch.Size(shape), dtype, world), dtype


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
    assert repr(arena) == "FlatBuffer(torch.float32: 262,144, torch.bfloat16: 262,144; 1.5 MiB)"


def test_an_arena_of_nothing_is_empty() -> None:
    arena = FlatBuffer([], CPU)
    assert (arena.flat, arena.views, arena.nbytes) == ({}, [], 0)


BF16, FP32 = torch.bfloat16, torch.float32


class Memory:
    """Emulate the memory of two ranks."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, list[Tensor]]] = []

    def empty(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        both = [torch.zeros(numel, dtype=dtype) for _ in range(2)]
        self.given.append((both[0], both))
        return both[0], both


def add(records: Records, owner: nn.Module | None, *shape: int, dtype: torch.dtype = FP32, trained: bool = True) -> Any:
    layout = ShardLayout.from_shape(torch.Size(shape), dtype, 2)
    index = len(list(records))
    shard = torch.full((layout.shard_numel,), index + 1, dtype=dtype)
    param = nn.Parameter(shard.view(layout.visible_shape), requires_grad=trained and dtype.is_floating_point)
    spec: Any = MagicMock(rank=0)
    record = ShardedParameter(index, f"p{index}", param, layout, {Role.MASTER_SHARD: shard}, spec)
    record.owners = [] if owner is None else [(owner, f"p{index}")]
    records.add(record)
    return record


@pytest.fixture
def records() -> Records:
    found = Records()
    layer, embedding = nn.Linear(1, 1), nn.Embedding(1, 1)
    add(found, layer, 20, 10)
    add(found, layer, 20)
    add(found, embedding, 30, 10)
    add(found, layer, 8, 8, dtype=BF16)
    add(found, layer, 5, trained=False)
    add(found, layer, 5, dtype=torch.int64)
    add(found, None, 7, 7)  # no module reads it
    return found


@pytest.fixture
def executor() -> Any:
    executor = MagicMock()
    executor.weights.uses_epoch_lock.return_value = False
    return executor


def memory_of(records: Records, executor: Any, peers: Any = None) -> ShardMemory:
    memory = ShardMemory(executor, MagicMock(device=CPU, shard_host_count=1), records, peers)
    memory.place_shards(records.live)
    return memory


def are_neighbours(tensors: list[Tensor]) -> bool:
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    return all(end == after.data_ptr() for end, after in zip(ends, tensors[1:], strict=False))


def having(records: Records, role: Role) -> list[int]:
    return [record.index for record in records if role in record.memory]


def test_shards_are_neighbours_in_the_order_given_and_keep_their_values(records: Records, executor: Any) -> None:
    memory = ShardMemory(executor, MagicMock(device=CPU), records)
    order = [records[2], records[0], records[1]]
    memory.place_shards(order)
    assert are_neighbours([record.shard for record in order])
    for record in order:
        assert record.shard.eq(record.index + 1).all()
        assert record.param.data_ptr() == record.shard.data_ptr()
        executor.parameters.move.assert_any_call(record.index, record.shard)
    names = [name for name, *_ in executor.mock_calls]
    assert names[0] == "weights.begin_writing"
    assert names[-1] == "weights.end_writing"
    executor.parameters.set_peer_shards.assert_not_called()


def test_other_ranks_shards_are_told_where_they_can_be_read(records: Records, executor: Any) -> None:
    theirs = Memory()
    peers = MagicMock(placement_is_pending=False)
    peers.allocate_shards = lambda executor, sizes: {dtype: theirs.empty(n, dtype) for dtype, n in sizes.items()}
    memory_of(records, executor, peers)
    for record in records.live:
        everyone = next(both for mine, both in theirs.given if mine.dtype == record.param.dtype)
        begin = record.shard.data_ptr() - everyone[0].data_ptr()
        by_kind = next(c.args[1] for c in executor.parameters.set_peer_shards.mock_calls if c.args[0] == record.index)
        assert [part.data_ptr() for part in by_kind] == [whole.data_ptr() + begin for whole in everyone]
        assert all(part.numel() == record.layout.shard_numel for part in by_kind)


def away_of(records: Records, executor: Any) -> tuple[ShardMemory, list[tuple[Tensor, Tensor]]]:
    """Return memory with masters on the host, which the device and the CPU see as two tensors."""
    given: list[tuple[Tensor, Tensor]] = []

    def allocate(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        seen = torch.zeros(numel, dtype=dtype)
        given.append((seen, seen.detach()))
        return given[-1]

    memory = ShardMemory(
        executor, MagicMock(device=CPU, shard_host_count=1), records, policy=HostMasterPolicy(BF16, allocate)
    )
    memory.place_shards(records.live)
    return memory, given


def test_masters_leave_that_compiled_code_reads_in_another_dtype(records: Records, executor: Any) -> None:
    add(records, nn.Linear(1, 1), 6, 9)
    memory, given = away_of(records, executor)
    [(seen, _)] = given
    assert [record.index for record in records if record.is_on_host] == [0, 7], "matrices, in float32, but no embedding"
    assert are_neighbours([records[0].shard, records[7].shard])
    assert [c.args[0] for c in executor.parameters.mark_on_host.mock_calls] == [0, 7]
    assert memory.on_host is not None
    assert memory.shards is not None
    assert memory.on_host.flat[FP32] is seen
    assert memory.shards.flat[FP32].data_ptr() == records[1].shard.data_ptr()
    for record in records.live:
        assert record.shard.eq(record.index + 1).all()
        assert record.param.data_ptr() == record.shard.data_ptr()
    for record in (records[0], records[7]):
        assert record.on_host is not None
        assert record.on_host.data_ptr() == record.shard.data_ptr()
        assert record.on_host is not record.shard
    memory.group_shards([[records[7].param, records[1].param], [records[0].param]])
    assert are_neighbours([records[7].shard, records[0].shard])
    assert records[0].shard.eq(1).all()
    assert records[7].shard.eq(8).all()
    for record in (records[0], records[7]):
        assert record.on_host is not None
        assert record.on_host.data_ptr() == record.shard.data_ptr() == record.param.data_ptr()
    assert len(given) == 1, "memory of the host is allocated once"
    placed, shard = memory.on_host, records[7].shard
    memory.group_shards([[records[7].param, records[1].param], [records[0].param]])
    assert memory.on_host is placed
    assert records[7].shard is shard, "they lie as they should"
    memory.allocate_gradients()
    assert are_neighbours([records[index].memory[Role.GRADIENT] for index in (7, 0)])


def away_to_cpu() -> HostMasterPolicy:
    def allocate(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        seen = torch.zeros(numel, dtype=dtype)
        return seen, seen.detach()

    return HostMasterPolicy(BF16, allocate)


def waiting(records: Records, executor: Any) -> tuple[ShardMemory, Any]:
    """Return memory before a plan, when no rank reads another's shards."""
    peers = MagicMock(placement_is_pending=True)
    peers.allocate_shards.return_value = {}
    peers.finalize_placement = peers.move_shards_to_host = MagicMock(
        side_effect=lambda: setattr(peers, "placement_is_pending", False)
    )
    memory = ShardMemory(executor, MagicMock(device=CPU, first_rank_error=lambda error: None), records, peers)
    memory.place_shards(records.live)
    return memory, peers


@pytest.mark.parametrize("by_arranging", [False, True])
def test_shards_that_wait_for_a_plan_are_placed_once_more(records: Records, executor: Any, by_arranging: bool) -> None:
    memory, peers = waiting(records, executor)
    before, order = memory.shards, [record.param for record in memory._in_memory_order()]
    memory.group_shards([order]) if by_arranging else memory.finalize_layout()
    assert memory.shards is not before, "in the same order, since peers have given no memory yet"
    assert peers.allocate_shards.call_count == 2
    assert [record.param for record in memory._in_memory_order()] == order
    placed = memory.shards
    memory.finalize_layout()
    assert memory.shards is placed
    for record in records.live:
        assert record.shard.eq(record.index + 1).all()


def test_masters_may_leave_until_something_is_laid_out_like_them_or_read_by_others(
    records: Records, executor: Any
) -> None:
    memory, _ = waiting(records, executor)
    assert memory.can_move_to_host
    executor.weights.uses_epoch_lock.return_value = True
    assert not memory.can_move_to_host
    executor.weights.uses_epoch_lock.return_value = False
    memory.move_to_host(away_to_cpu())
    assert [record.index for record in records if record.is_on_host] == [0]
    for record in records.live:
        assert record.shard.eq(record.index + 1).all()
        assert record.param.data_ptr() == record.shard.data_ptr()
    assert not memory.can_move_to_host, "they have"


def test_masters_stay_once_training_has_begun(records: Records, executor: Any) -> None:
    memory, _ = waiting(records, executor)
    memory.allocate_gradients()
    assert not memory.can_move_to_host
    memory.finalize_layout()
    assert are_neighbours([records[index].memory[Role.GRADIENT] for index in (0, 1, 2)]), "as they were laid out"


def test_copies_of_masters_that_left_lie_like_them_and_are_written_by_steps(records: Records, executor: Any) -> None:
    add(records, nn.Linear(1, 1), 6, 9)
    memory, _ = away_of(records, executor)
    memory.allocate_compute_shards(BF16)
    assert having(records, Role.COMPUTE_SHARD) == [0, 1, 2, 4, 7]
    assert are_neighbours([records[index].memory[Role.COMPUTE_SHARD] for index in (0, 7)])
    assert memory.shards is not None
    [((_, masters), _)] = executor.parameters.add_compute_shard_memory.call_args_list
    assert masters is memory.shards.flat[FP32], "those on the host are not read over the link at each step"
    assert [c.args[0] for c in executor.parameters.set_compute_shard.mock_calls] == [0, 1, 2, 4, 7]


def test_optimizers_arrange_shards_until_training_begins(records: Records, executor: Any) -> None:
    memory = memory_of(records, executor)
    memory.group_shards([[records[1].param], [records[2].param, records[0].param]])
    assert are_neighbours([records[1].shard, records[0].shard, records[2].shard])
    memory.group_shards([[r.param for r in records.live]], lambda record: record.param.dim())
    assert are_neighbours([records[1].shard, records[4].shard, records[0].shard, records[2].shard])
    before = memory.shards
    memory.allocate_gradients()
    memory.group_shards([[records[2].param]])
    assert memory.shards is before, "gradients lie as shards do"


def test_gradients_lie_as_their_shards_do_for_what_is_trained(records: Records, executor: Any) -> None:
    memory = memory_of(records, executor)
    memory.allocate_gradients()
    first = memory.gradients
    assert having(records, Role.GRADIENT) == [0, 1, 2, 3]
    assert are_neighbours([records[index].memory[Role.GRADIENT] for index in (0, 1, 2)])
    records[4].param.requires_grad_()
    memory.allocate_gradients()
    memory.allocate_gradients()
    assert having(records, Role.GRADIENT) == [0, 1, 2, 3, 4]
    assert memory.gradients is first
    assert sorted(c.args[0] for c in executor.parameters.set_grad.mock_calls) == [0, 1, 2, 3, 4]
    for record in records:
        assert record.gradient is record.memory.get(Role.GRADIENT)
        if record.gradient is not None:
            assert (record.gradient.dtype, record.gradient.shape) == (record.shard.dtype, record.shard.shape)
            assert not record.gradient.any()


def test_wider_shards_have_compute_copies_laid_out_like_them(records: Records, executor: Any) -> None:
    memory = memory_of(records, executor)
    for _ in range(2):
        memory.allocate_compute_shards(BF16)
    assert having(records, Role.COMPUTE_SHARD) == [0, 1, 2, 4]
    assert having(records, Role.FULL_PRECISION_SHARD) == []
    copies = memory.tensors(Role.COMPUTE_SHARD)
    assert are_neighbours(copies)
    assert all(copy.dtype == BF16 for copy in copies)
    assert memory.shards is not None
    [((whole, masters), _)] = executor.parameters.add_compute_shard_memory.call_args_list
    assert masters is memory.shards.flat[FP32]
    assert whole.data_ptr() == copies[0].data_ptr()
    assert [c.args[0] for c in executor.parameters.set_compute_shard.mock_calls] == [0, 1, 2, 4]
    executor.parameters.set_peer_compute_shards.assert_not_called()


def test_peers_read_compute_copies_and_in_full_precision_what_autocast_leaves(records: Records, executor: Any) -> None:
    memory, peers = memory_of(records, executor), Memory()
    memory.allocate_compute_shards(BF16, peers)  # type: ignore[arg-type]
    assert [c.args[0] for c in executor.parameters.set_peer_compute_shards.mock_calls] == [0, 1, 2, 4]
    assert having(records, Role.FULL_PRECISION_SHARD) == [1, 2, 4], "biases, and an embedding"
    (_, both), (_, full_precision) = peers.given
    for made in executor.parameters.set_peer_compute_shards.mock_calls:
        record = records[made.args[0]]
        begin = record.memory[Role.COMPUTE_SHARD].data_ptr() - both[0].data_ptr()
        assert [part.data_ptr() for part in made.args[1]] == [whole.data_ptr() + begin for whole in both]
    for made in executor.parameters.set_full_precision_shard.mock_calls:
        index, mine, everyone = made.args
        assert mine is records[index].memory[Role.FULL_PRECISION_SHARD]
        assert (mine.dtype, mine.numel()) == (FP32, records[index].layout.shard_numel)
        begin = mine.data_ptr() - full_precision[0].data_ptr()
        assert [part.data_ptr() for part in everyone] == [whole.data_ptr() + begin for whole in full_precision]
    assert executor.mock_calls[-1] == call.weights.begin_writing(False), "what is read first must be written"


def test_nothing_is_known_of_copies_for_which_there_is_not_enough(records: Records, executor: Any) -> None:
    memory, peers = memory_of(records, executor), MagicMock()
    peers.empty.side_effect = [Memory().empty(1000, BF16), RuntimeError("there is no more")]
    executor.reset_mock()
    with pytest.raises(RuntimeError):
        memory.allocate_compute_shards(BF16, peers)
    assert executor.parameters.mock_calls == []
    assert having(records, Role.COMPUTE_SHARD) == []


def test_where_ranks_take_turns_shards_themselves_are_read_in_full_precision(records: Records, executor: Any) -> None:
    executor.weights.uses_epoch_lock.return_value = True
    memory_of(records, executor).allocate_compute_shards(BF16, Memory())  # type: ignore[arg-type]
    assert having(records, Role.FULL_PRECISION_SHARD) == []


def test_weights_that_fit_the_budget_are_cached_and_visible_to_their_modules(records: Records, executor: Any) -> None:
    memory = memory_of(records, executor)
    padded = 2 * records[0].layout.shard_numel
    for _ in range(2):
        # p0, p2 and p3 are not small; p2 does not fit.
        memory.cache_unsharded(BF16, small_bytes=100, budget_bytes=2 * padded + 300)
    assert having(records, Role.UNSHARDED_CACHE) == [0, 3]
    [view, _] = memory.tensors(Role.UNSHARDED_CACHE)
    assert (view.shape, view.dtype) == (torch.Size((20, 10)), BF16)
    (layer, key), *_ = records[0].owners
    assert layer.__dict__[UNSHARDED_CACHE][key] is view
    index, flat = executor.parameters.set_unsharded_cache.mock_calls[0].args
    assert (index, flat.numel(), flat.data_ptr()) == (0, padded, view.data_ptr())
    before = memory.shards
    memory.group_shards([[records[2].param], [records[0].param]])
    assert memory.shards is before


def test_all_weights_are_cached_where_nothing_limits_them_and_wide_where_autocast_leaves_them_so(
    records: Records, executor: Any
) -> None:
    memory = memory_of(records, executor)
    memory.cache_unsharded(BF16, small_bytes=100, budget_bytes=math.inf)
    dtypes = {r.index: r.memory[Role.UNSHARDED_CACHE].dtype for r in records if Role.UNSHARDED_CACHE in r.memory}
    assert dtypes == {0: BF16, 1: FP32, 2: FP32, 3: BF16, 4: FP32, 5: torch.int64}


def test_another_budget_gives_memory_back(records: Records, executor: Any) -> None:
    memory = memory_of(records, executor)
    memory.cache_unsharded(None, 0, 0.0)
    assert executor.parameters.set_unsharded_cache.mock_calls == []
    memory.cache_unsharded(None, 0, math.inf)
    (layer, key), *_ = records[0].owners
    assert key in layer.__dict__[UNSHARDED_CACHE]
    memory.cache_unsharded(None, 0, 0.0)
    assert memory.tensors(Role.UNSHARDED_CACHE) == []
    assert key not in layer.__dict__[UNSHARDED_CACHE]
    assert executor.parameters.set_unsharded_cache.mock_calls[-1] == call(5, None)


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_wait_whole_or_as_the_host_has_them(records: Records, executor: Any, whole: bool) -> None:
    memory = memory_of(records, executor)
    memory.allocate_gradients()
    memory.allocate_deferred_gradients(not whole)
    for _ in range(2):
        memory.allocate_deferred_gradients(whole)
    assert having(records, Role.DEFERRED_GRADIENT) == having(records, Role.GRADIENT) == [0, 1, 2, 3]
    for record in records:
        if record.gradient is not None:
            waiting = record.memory[Role.DEFERRED_GRADIENT]
            assert waiting.dtype == FP32
            assert waiting.numel() == (2 if whole else 1) * record.layout.shard_numel
    memory.free_deferred_gradients()
    assert memory.tensors(Role.DEFERRED_GRADIENT) == []
    assert executor.parameters.set_deferred_gradient.mock_calls[-1] == call(3, None, False)
