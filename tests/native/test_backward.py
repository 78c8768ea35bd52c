"""The executor in single backward passes: ranks that differ, interruptions, nested backwards."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from tests.helpers.options import config
from tests.helpers.oracle import assert_close_relative
from tests.native.sequences import PEER_WAIT_S, Deliver, Interruption, Twin, deliver, new_twin, ops
from tests.ranks.pool import Ranks

CPU = torch.device("cpu")
TINY = 1e-6  # MiB: each parameter has its own bucket


def make(mesh: Mesh, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, **reduce: Any) -> Any:
    executor = Executor(mesh, config(**reduce))
    return executor, [new_twin(executor, f"p{i}", torch.zeros(shape, dtype=dtype)) for i, shape in enumerate(shapes)]


def gradient(twin: Twin, rank: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + 10 * twin.index + rank)
    return torch.randn(twin.full.shape, generator=generator, dtype=torch.float64).to(twin.full.dtype)


def assert_grad(twin: Twin, contributions: list[Tensor | None], held: Tensor | float = 0.0) -> None:
    """Return the mean over ranks, with zeros for ranks without a gradient."""
    world = dist.get_world_size()
    assert twin.param.grad is not None
    total = sum((c.double() for c in contributions if c is not None), torch.zeros(twin.full.shape, dtype=torch.float64))
    expected = twin.part((total / world + held).to(twin.full.dtype), dist.get_rank())
    assert_close_relative(twin.param.grad, expected, 1e-6, what=f"gradient of p{twin.index}")
    begin, end = twin.layout.shard_range(dist.get_rank())
    assert not twin.param.grad.reshape(-1)[end - begin :].any(), "padding is not zero"


def some_ranks_only(bucket_mb: float) -> dict[str, int]:
    """p0: all ranks. p1: only rank 0. p2: only the last rank, twice. p3: none.

    Each rank has its own order.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    executor, (p0, p1, p2, p3) = make(Mesh.from_world(CPU), [(7, 3), (5,), (40,), (2, 2)], reduce_bucket_mb=bucket_mb)
    last = world - 1
    for step in range(3):  # ranks differ in the order of the first step, so it must not be adopted
        arrivals = [(gradient(p0, rank, step), p0.param)]
        if rank == 0:
            arrivals.insert(0, (gradient(p1, 0, step), p1.param))
        if rank == last:
            arrivals = [(gradient(p2, rank, step), p2.param), *arrivals, (gradient(p2, rank, step), p2.param)]
        deliver(arrivals)
        assert_grad(p0, [gradient(p0, r, step) for r in range(world)])
        assert_grad(p1, [gradient(p1, 0, step)])
        assert_grad(p2, [2 * gradient(p2, last, step)])
        assert p3.param.grad is None
        assert sorted(executor.gradients.last_attached()) == [0, 1, 2]
        for twin in (p0, p1, p2):
            twin.param.grad = None
    counters = executor.counters()
    executor.close()
    return counters


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("bucket_mb", [64.0, TINY], ids=["one bucket", "a bucket each"])
def test_gradients_that_some_ranks_lack_count_as_zero(ranks: Ranks, world_size: int, bucket_mb: float) -> None:
    for counters in ranks.run(world_size, some_ranks_only, bucket_mb):
        assert counters["agreements"] == 3


def interrupt_and_repeat() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    executor, twins = make(
        Mesh.from_world(CPU), [(31,), (8, 9), (3,), (100,)], reduce_bucket_mb=TINY, reduce_double_buffer=False
    )
    arrivals = [(gradient(t, rank), t.param) for t in reversed(twins)]
    deliver(arrivals)
    for reach in range(1, len(twins)):
        # The next pass starts afresh, whether buckets were launched, accumulated or still filling.
        for twin in twins:
            twin.param.grad = None
        with pytest.raises(Interruption):
            deliver([(math.nan * grad, param) for grad, param in arrivals[:reach]], interrupted=True)
        assert all(twin.param.grad is None for twin in twins)
        deliver(arrivals[1:])
        assert twins[-1].param.grad is None
        for twin in twins[:-1]:
            assert_grad(twin, [gradient(twin, r) for r in range(world)])
    assert executor.counters()["aborted_backwards"] == len(twins) - 1
    executor.close()


def test_a_backward_after_an_interrupted_one_is_right(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, interrupt_and_repeat)


def two_at_once() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    (a, ours), (b, theirs) = (
        make(Mesh.from_world(CPU), [(33,), (4, 4)]),
        make(Mesh.from_world(CPU), [(33,), (4, 4), (5,)], reduce_bucket_mb=TINY),
    )
    mixed = [(gradient(t, rank, n), t.param) for pair in zip(ours, theirs, strict=False) for n, t in enumerate(pair)]
    for _ in range(2):
        deliver(mixed[:2], mixed[2:])  # one backward pass for both executors
        deliver([mixed[1]])  # a backward pass of the second executor only
    for twin in ours:
        assert_grad(twin, [2 * gradient(twin, r, 0) for r in range(world)])
    assert_grad(theirs[0], [4 * gradient(theirs[0], r, 1) for r in range(world)])
    assert_grad(theirs[1], [2 * gradient(theirs[1], r, 1) for r in range(world)])
    assert theirs[2].param.grad is None
    assert a.counters()["reduces"] == 4
    assert b.counters()["reduces"] == 6
    a.close()
    with pytest.raises(ValueError, match="no shard of a live engine.*the engine was closed"):
        ops.gather(ours[0].param, [33], torch.float32)
    assert torch.equal(ops.gather(theirs[0].param, [33], torch.float32), theirs[0].full)
    deliver([mixed[3]])
    assert_grad(theirs[1], [3 * gradient(theirs[1], r, 1) for r in range(world)])
    b.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_executors_in_one_process_do_not_see_each_other(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, two_at_once)


class Outer(torch.autograd.Function):
    """Run another backward pass in its backward, as reentrant activation checkpointing does."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, arrivals: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.arrivals = arrivals
        return root.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            deliver(ctx.arrivals)
        return grad, None


def nested() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    executor, twins = make(Mesh.from_world(CPU), [(31,), (8, 9), (3,)])
    p0, p1, p2 = twins
    for step in range(1, 3):
        root = torch.zeros((), requires_grad=True)
        root = Deliver.apply(root, [(gradient(p0, rank), p0.param)], False)
        root = Outer.apply(root, [(gradient(p0, rank), p0.param), (gradient(p1, rank), p1.param)])
        Deliver.apply(root, [(gradient(p1, rank), p1.param), (gradient(p2, rank), p2.param)], False).backward()
        for twin, times in ((p0, 2), (p1, 2), (p2, 1)):
            assert_grad(twin, [step * times * gradient(twin, r) for r in range(world)])
    executor.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_inside_a_backward_loses_nothing(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, nested)


def nested_and_then_nothing() -> None:
    """The checkpointed region is the first in the model, so no gradient arrives after it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    executor, (p0, p1) = make(Mesh.from_world(CPU), [(31,), (8, 9)])
    for step in range(1, 4):
        root = Outer.apply(torch.zeros((), requires_grad=True), [(gradient(p0, rank), p0.param)])
        Deliver.apply(root, [(gradient(p1, rank), p1.param)], False).backward()
        for twin in (p0, p1):
            assert_grad(twin, [step * gradient(twin, r) for r in range(world)])
    executor.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_inside_a_backward_may_be_the_last_to_bring_gradients(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, nested_and_then_nothing)


def replaced_gradient(double_buffer: bool) -> None:
    """A second gradient arrives after its bucket was sent, in addition to the user's own gradient."""
    world, rank = dist.get_world_size(), dist.get_rank()
    executor, (twin,) = make(Mesh.from_world(CPU), [(31,)], reduce_double_buffer=double_buffer)
    twin.param.grad = twin.part(torch.ones(31), rank)
    users = twin.param.grad
    deliver([(gradient(twin, rank), twin.param)], [(gradient(twin, rank), twin.param)])
    assert executor.counters()["late_flushes"] == 1
    assert_grad(twin, [2 * gradient(twin, r) for r in range(world)], held=1.0)
    assert torch.equal(users, twin.part(torch.ones(31), rank)), "the user's own tensor was written to"
    executor.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("double_buffer", [True, False], ids=["two buffers", "one buffer"])
def test_a_late_gradient_adds_to_one_that_the_user_replaced(ranks: Ranks, world_size: int, double_buffer: bool) -> None:
    ranks.run(world_size, replaced_gradient, double_buffer)


class Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root: Tensor, call: Callable[[], Any]) -> Tensor:
        ctx.call = call
        return root.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def in_one_backward(*calls: Callable[[], Any]) -> None:
    root = torch.zeros((), requires_grad=True)
    for call in reversed(calls):
        root = Call.apply(root, call)
    root.backward()


def recorded_behind_a_deferred_gradient() -> None:
    """Capture a graph's backward while an earlier bucket still has deferred gradients to send."""
    world, rank = dist.get_world_size(), dist.get_rank()
    executor, (a, b, first) = make(Mesh.from_world(CPU), [(31,), (8, 9), (5,)])
    gradients, graphs = executor.gradients, executor.graphs
    segments: list[int] = []

    def bring(twin: Twin, number: int) -> Callable[[], None]:
        return lambda: ops.reduce_add(gradient(twin, rank, number), twin.param)

    def identify() -> None:
        segments.append(gradients.segment())

    def record() -> None:
        graphs.begin(True, gradients.has_gradients(), segments[0])
        bring(b, 2)()
        number = graphs.end()
        graphs.before_replay(number)
        graphs.after_replay(number)

    in_one_backward(bring(first, 0), bring(a, 0), gradients.mark, bring(b, 0), gradients.mark, identify)
    for twin in (a, b, first):
        twin.param.grad = None
        executor.parameters.set_deferred_gradient(twin.index, torch.zeros(world * twin.layout.shard_numel), True)
    gradients.defer(True, True)
    in_one_backward(bring(first, 1), bring(a, 1), gradients.mark, bring(b, 1), gradients.mark)
    gradients.defer(False)
    in_one_backward(bring(first, 2), gradients.mark, record)
    assert_grad(first, [gradient(first, r, 1) + gradient(first, r, 2) for r in range(world)])
    assert_grad(a, [gradient(a, r, 1) for r in range(world)])
    assert_grad(b, [gradient(b, r, 1) + gradient(b, r, 2) for r in range(world)])
    executor.close()


def test_recording_sends_a_deferred_gradient_once(ranks: Ranks) -> None:
    ranks.run(2, recorded_behind_a_deferred_gradient)


def low_precision_mean(dtype: torch.dtype) -> float:
    executor, (twin,) = make(Mesh.from_world(CPU), [(30_000,)], dtype)
    grads = [gradient(twin, r) for r in range(dist.get_world_size())]
    deliver([(grads[dist.get_rank()], twin.param)])
    expected = twin.part(sum(g.double() for g in grads) / len(grads), dist.get_rank())
    assert twin.param.grad is not None
    executor.close()
    return ((twin.param.grad.double() * expected).sum() / expected.square().sum() - 1).item()


def test_dividing_by_three_in_low_precision_is_not_biased(ranks: Ranks) -> None:
    # Rounding errors of single elements cancel. A factor of 1/3 rounded to bfloat16 has an error of 0.2%.
    for dtype in (torch.bfloat16, torch.float16):
        assert all(abs(bias) < 5e-4 for bias in ranks.run(3, low_precision_mean, dtype)), dtype


def in_time(made: Callable[[], list[dict[str, int]]]) -> list[dict[str, int]]:
    """Make it again if a rank took longer than the host waits for a peer before it allocates another bucket."""
    for _ in range(5):
        begun = time.monotonic()
        found, taken = made(), torch.tensor(time.monotonic() - begun)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if taken < PEER_WAIT_S:
            break
    return found


def count_buckets() -> list[dict[str, int]]:
    return in_time(_count_buckets)


def _count_buckets() -> list[dict[str, int]]:
    world = dist.get_world_size()
    mesh = Mesh.from_world(CPU)
    capacity = 128 * 4 * world / 2**20  # one shard of 128 elements on each rank
    found = []
    for size in (128, 129):  # fits, does not fit
        executor, twins = make(mesh, [(size * world,)] * 5, reduce_bucket_mb=capacity)
        for _ in range(4):
            deliver([(gradient(t, 0), t.param) for t in reversed(twins)])
        found.append(executor.counters())
        executor.close()
    return found


def test_buckets_are_counted_and_grow_only_for_what_does_not_fit(ranks: Ranks, world_size: int) -> None:
    for fits, larger in ranks.run(world_size, count_buckets):
        assert fits["grown_buckets"] == 0
        assert fits["allocated_buckets"] == 2
        assert fits["flushes"] == fits["buckets"] * 4 == 20
        assert fits["reduces"] == 20
        assert fits["reduce_bytes"] == 20 * 128 * 4 * world_size
        received = int(world_size > 1)  # one rank adds its gradients from where they lie
        assert fits["bucket_bytes"] == 2 * 128 * 4 * (world_size + received)
        assert fits["plans"] == 2  # in the order of registration, then in that of the first backward
        assert fits.get("late_flushes", 0) == 0
        assert fits.get("agreements", 0) == (4 if world_size > 1 else 0)
        assert larger["grown_buckets"] > 0
        assert larger["flushes"] == 20
        assert larger["reduce_bytes"] == 20 * 160 * 4 * world_size


def wrong_calls() -> None:
    executor, (twin, frozen) = make(Mesh.from_world(CPU), [(4, 3), (2,)])
    frozen.param.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"gradient of p0 has shape \[3\].*the parameter has shape \[4, 3\]"):
        deliver([(torch.ones(3), twin.param)])
    deliver([(torch.ones(2), frozen.param)])  # frozen since its forward, as torch would drop it
    assert frozen.param.grad is None
    with pytest.raises(RuntimeError, match=r"outside of a backward pass.*loss\.backward\(\)"):
        ops.reduce_add(torch.ones(4, 3), twin.param)
    for stranger in (torch.ones(12), twin.param.detach().clone()):
        with pytest.raises(ValueError, match=r"no shard of a live engine.*full_parameters\(module\)"):
            ops.gather(stranger, [4, 3], torch.float32)
    assert executor.gradients.segment() == -1, "nothing has come"
    grad = torch.ones(4, 3)
    lists: dict[str, Callable[[], Any]] = {
        "gather_group got no shards": lambda: ops.gather_group([], torch.float32, 12),
        "cached_gather_start got no shards": lambda: ops.cached_gather_start([], []),
        "cached_gather_wait got no shards": lambda: ops.cached_gather_wait([], []),
        "cached_gather_start got 1 shards, but 0": lambda: ops.cached_gather_start([], [twin.param]),
        "reduce_group got no shards": lambda: ops.reduce_group([], []),
        "reduce_group got 1 shards, but 2": lambda: ops.reduce_group([grad, grad], [twin.param]),
        "reduce_zero_copy got 1 shards, but 0": lambda: ops.reduce_zero_copy([grad], [twin.param], [], []),
        "reduce_release got no shards": lambda: ops.reduce_release([], []),
    }
    for message, call in lists.items():
        with pytest.raises(ValueError, match=message):
            call()
    deliver([(torch.ones(4, 3), twin.param)])  # still works
    assert_grad(twin, [torch.ones(4, 3)])
    executor.close()
    executor.close()


def test_wrong_calls_name_the_parameter_and_the_remedy(ranks: Ranks) -> None:
    ranks.run(1, wrong_calls)
