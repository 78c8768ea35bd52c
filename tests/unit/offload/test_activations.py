"""Test activations on the host: waits, exceptions, the quota, and reused host memory."""

import gc
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import HostMemoryError
from lightning_zero.offload.activations import (
    BLOCK_UNIT_BYTES,
    SPARE_DIVISOR,
    HostActivations,
    HostBlocks,
    OffloadQuota,
    ReservedBlocks,
)
from tests.helpers.copy_streams import ORDERS, DelayedCopyStreams, LateCopyStreams

CPU = torch.device("cpu")
WAITS = ("out behind compute", "compute behind out", "in behind compute", "compute behind in")


class OneBlock:
    """Lend the same memory each time."""

    def __init__(self, numel: int) -> None:
        self.memory = torch.zeros(4 * numel, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> Tensor:
        assert nbytes == self.memory.nbytes
        return self.memory


def train(order: Sequence[str], monkeypatch: pytest.MonkeyPatch, without: str = "") -> list[list[float]]:
    """Return the values that two backwards read. Device and host have room for one tensor each."""
    streams, room, read = DelayedCopyStreams(without), torch.zeros(4), []
    activations = HostActivations(CPU, OneBlock(4), streams)  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kwargs: room)
    for step in (1.0, 2.0):
        streams.compute(lambda step=step: room.fill_(step))
        host = activations.start_offload(room)
        activations.wait_offload(room, host)
        streams.compute(lambda: room.fill_(-1.0))  # another tensor has the memory
        streams.compute(lambda: read.append(room.tolist()))
        back = activations.start_load(host)
        activations.wait_load(back, host)
        streams.compute(lambda: read.append(room.tolist()))
    streams.run(order)
    return read


RIGHT = [[value] * 4 for value in (-1.0, 1.0, -1.0, 2.0)]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_all_waits_are_there(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(order, monkeypatch) == RIGHT


@pytest.mark.parametrize("wait", WAITS)
def test_each_wait_is_needed(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [train(order, monkeypatch, wait) for order in ORDERS]
    assert any(read != RIGHT for read in found), "a test of this wait would pass without it"


def test_each_race_that_others_had_is_one_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    late_compute, late_out, late_in = ("in", "out", "compute"), ("compute", "in", "out"), ("compute", "out", "in")
    assert train(late_compute, monkeypatch, "out behind compute")[1] != [1.0] * 4  # copied before it was written
    assert train(late_out, monkeypatch, "compute behind out")[1] != [1.0] * 4  # reused before its copy had finished
    assert train(late_in, monkeypatch, "compute behind in")[1] != [1.0] * 4  # read before its copy had finished
    assert train(late_compute, monkeypatch, "in behind compute")[1] != [1.0] * 4  # into memory that compute still used


def test_what_a_capture_would_send_counts_once_for_each_replay_and_not_before() -> None:
    activations, noted = HostActivations(CPU), list[int]()
    value = torch.ones(4)
    activations.quota.begin_pass(20)
    activations.wait_offload(value, activations.start_offload(value))
    with activations.uncounted(noted):
        activations.wait_offload(value, activations.start_offload(value))
    assert (activations.quota.sent, activations.quota.exceeded_by, noted) == (16, "", [16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "a part", "with gaps", "empty", "no dimension"])
def test_values_and_strides_come_back(dtype: torch.dtype, kind: str) -> None:
    whole = torch.randn(6, 8).gt(0) if dtype is torch.bool else (100 * torch.randn(6, 8)).to(dtype)
    value = {
        "contiguous": whole,
        "transposed": whole.t(),
        "a part": whole[2:4],
        "with gaps": whole[:, 1:5],
        "empty": whole[:0],
        "no dimension": whole[1, 2],
    }[kind]
    activations = HostActivations(CPU)
    host = activations.start_offload(value)
    activations.wait_offload(value, host)
    back = activations.start_load(host)
    activations.wait_load(back, host)
    assert torch.equal(back, value)
    assert (host.stride(), host.dtype) == (back.stride(), back.dtype) == (value.stride(), dtype)
    assert not {host.data_ptr(), back.data_ptr()} & {value.data_ptr()} or not value.numel()
    assert not activations._offloading
    assert not activations._loading


def test_another_tensor_than_the_copy_was_started_with_is_an_error() -> None:
    activations, value = HostActivations(CPU), torch.randn(4)
    host = activations.start_offload(value)
    with pytest.raises(RuntimeError, match="leave 'activations' out of offload="):
        activations.wait_offload(value.clone(), host)
    activations.wait_all()
    with pytest.raises(RuntimeError, match="has inserted a copy"):
        activations.wait_offload(value, host)


def test_what_an_exception_leaves_half_done_is_waited_for_before_it_is_let_go_of() -> None:
    streams = LateCopyStreams()
    activations, value = HostActivations(CPU, streams=streams), torch.randn(4)
    first, second = activations.start_offload(value), activations.start_offload(value + 1)
    activations.wait_offload(value, first)
    back = activations.start_load(first)
    assert back.isnan().all()
    assert streams.waiting == 2
    activations.wait_all()
    assert streams.waiting == 0
    assert torch.equal(back, value)
    assert torch.equal(second, value + 1)
    activations.wait_all()


def test_memory_is_used_again_from_step_to_step() -> None:
    blocks = HostBlocks(CPU)
    activations, values = HostActivations(CPU, blocks), [torch.randn(1000), torch.randn(3000)]
    for step in range(4):
        hosts = [activations.start_offload(value) for value in values]
        for value, host in zip(values, hosts, strict=True):
            activations.wait_offload(value, host)
        backs = [activations.start_load(host) for host in hosts]
        for back, host in zip(backs, hosts, strict=True):
            activations.wait_load(back, host)
        del hosts, host
        if not step:
            held = activations.nbytes
        assert activations.nbytes == held == 4096 + 3 * 4096


MOST = 1000.0


def run_pass(
    quota: OffloadQuota, calls_per_pass: list[list[str]], wanted: dict[str, int], graphs: dict[str, int]
) -> int:
    """Run graphs by name, compiled at their first call, and return the bytes sent."""
    quota.begin_pass(MOST)
    for names in calls_per_pass:
        quota.begin_call(" and ".join(names))
        for name in names:
            if name not in graphs:
                graphs[name] = int(min(wanted[name], quota.remaining(MOST)))
            quota.record(graphs[name])
    return quota.sent


@pytest.mark.parametrize("seed", range(200))
def test_passes_keep_to_the_amount(seed: int) -> None:
    rng = random.Random(seed)
    wanted = {name: rng.choice([0, 50, 400, 2000]) for name in "abcdef"}
    kinds = [["a", "b"], ["c"], ["d", "e", "f"]]  # graphs of modules, some of which look alike
    calls_per_pass = [rng.choice(kinds) for _ in range(rng.randint(1, 6))]
    quota, graphs = OffloadQuota(calls_per_pass=len(calls_per_pass)), dict[str, int]()
    for _ in range(2):
        assert run_pass(quota, calls_per_pass, wanted, graphs) <= MOST
        assert quota.exceeded_by == ""


def test_one_call_may_send_all_of_it_and_what_a_call_leaves_over_goes_to_later_ones() -> None:
    assert run_pass(OffloadQuota(), [["a", "b", "c"]], {"a": 700, "b": 700, "c": 700}, {}) == MOST
    graphs: dict[str, int] = {}
    run_pass(OffloadQuota(calls_per_pass=2), [["a"], ["b"]], {"a": 100, "b": 2000}, graphs)
    assert graphs == {"a": 100, "b": 900}
    run_pass(OffloadQuota(calls_per_pass=2), [["a"], ["b"]], {"a": 2000, "b": 2000}, again := {})
    assert again == {"a": 500, "b": 500}


def test_who_goes_beyond_it_is_named() -> None:
    quota = OffloadQuota()
    run_pass(quota, [["a"], ["a"]], {"a": 700}, {})
    assert (quota.sent, quota.exceeded_by) == (1400, "a")
    quota.begin_pass(MOST)
    assert (quota.sent, quota.exceeded_by) == (0, "")


class Memory:
    """Record its allocations."""

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
    first = blocks.allocate(1000)
    place, view = first.data_ptr(), first.view(torch.float32)[3:].unsqueeze(0)
    assert first.shape == (1000,)
    del first
    second = blocks.allocate(1000)
    assert second.data_ptr() != place, "a view of it is still there"
    del view
    third = blocks.allocate(999)
    assert third.data_ptr() == place
    assert memory.given == [BLOCK_UNIT_BYTES, BLOCK_UNIT_BYTES]
    assert blocks.nbytes == 2 * BLOCK_UNIT_BYTES


def test_what_is_saved_for_a_backward_that_never_comes_is_free_with_its_graph() -> None:
    blocks, memory = blocks_of()

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(blocks.allocate(64).view(torch.float32))
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad * ctx.saved_tensors[0].sum()

    for _ in range(3):
        loss = Keeps.apply(torch.ones(2, requires_grad=True)).sum()
        del loss
    gc.collect()
    assert memory.given == [BLOCK_UNIT_BYTES]


def test_the_smallest_that_fits_is_taken_and_none_that_is_much_too_large() -> None:
    blocks, memory = blocks_of()
    sizes = [64 * BLOCK_UNIT_BYTES, 66 * BLOCK_UNIT_BYTES, 100 * BLOCK_UNIT_BYTES]
    lent = [blocks.allocate(size) for size in sizes]
    places = [block.data_ptr() for block in lent]
    lent.clear()
    assert blocks.allocate(65 * BLOCK_UNIT_BYTES).data_ptr() == places[1]
    assert blocks.allocate(63 * BLOCK_UNIT_BYTES).data_ptr() == places[0]
    blocks.allocate(50 * BLOCK_UNIT_BYTES)
    assert memory.given == [*sizes, 50 * BLOCK_UNIT_BYTES]


def test_sizes_that_do_not_come_any_more_are_given_back() -> None:
    blocks, memory = blocks_of()
    for _ in range(3):
        for size in (7, 1, 4, 2, 8, 3):
            blocks.allocate(size * 100 * BLOCK_UNIT_BYTES)
            assert blocks.nbytes <= 800 * BLOCK_UNIT_BYTES * (1 + 1 / SPARE_DIVISOR)
    assert len(memory.given) > 6
    blocks.free_unused()
    assert blocks.nbytes == 0


def test_where_the_host_has_no_more_what_is_free_is_given_back_first() -> None:
    blocks, memory = blocks_of(limit=2)
    held = blocks.allocate(1000)
    blocks.allocate(50 * BLOCK_UNIT_BYTES)
    with pytest.raises(HostMemoryError):
        blocks.allocate(100 * BLOCK_UNIT_BYTES)
    assert blocks.nbytes == BLOCK_UNIT_BYTES
    memory.limit = 3
    blocks.allocate(100 * BLOCK_UNIT_BYTES)
    assert held.shape == (1000,)


def test_what_graphs_hold_stays_theirs_and_the_next_graph_that_holds_it_uses_it_again() -> None:
    blocks, memory = blocks_of()
    held = ReservedBlocks()
    with blocks.reserving(held):
        places = [blocks.allocate(n * BLOCK_UNIT_BYTES).data_ptr() for n in (1, 1, 9)]
    assert len(set(places)) == 3
    outside = blocks.allocate(BLOCK_UNIT_BYTES)
    assert outside.data_ptr() not in places
    with blocks.reserving(held):
        assert [blocks.allocate(n * BLOCK_UNIT_BYTES).data_ptr() for n in (9, 1, 1)] == [places[2], *places[:2]]
        fourth = blocks.allocate(BLOCK_UNIT_BYTES).data_ptr()
    assert fourth not in (*places, outside.data_ptr())
    made = len(memory.given)
    del held
    assert {blocks.allocate(n * BLOCK_UNIT_BYTES).data_ptr() for n in (9,)} == {places[2]}
    assert len(memory.given) == made
