"""Weights copied from peers' memory, and gradients into it, with faults of shared memory."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.engine import engine_of
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.profiling.cost_model import NOMINAL_COSTS
from lightning_zero.sharding.shared_memory import map_shared
from lightning_zero.sharding.symm_mem import SymmetricMemory, transports
from lightning_zero.sharding.symm_mem import symmetric_memory as peer_memory
from tests.helpers.models import OneLayer, TiedLayer, build, make_batches
from tests.helpers.options import config
from tests.helpers.oracle import Reference, assert_close_relative, assert_same_bits, shard_batch
from tests.helpers.sharded import engine_for, sgd, train_case, train_sharded
from tests.ranks.pool import Ranks

BF16 = torch.bfloat16
MIXED: dict[str, Any] = {"compute_dtype": BF16, "reduce_dtype": BF16, "gather_group_mb": 0.01}
COPY: dict[str, Any] = {"gather_transport": "copy", "reduce_transport": "copy"}
autocast = partial(torch.autocast, "cpu", BF16, cache_enabled=False)


def memory() -> SymmetricMemory:
    return SymmetricMemory(Mesh.from_world(torch.device("cpu")))


def in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("faults-")}  # a job's folder


def left_since(before: set[str]) -> set[str]:
    """Tests may run concurrently: their files in this place are removed again, and leaked ones remain."""
    end = time.monotonic() + 30.0
    while (left := in_shared_memory() - before) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def write_and_read() -> tuple[list[int], set[str]]:
    own = memory()
    before = in_shared_memory()
    dist.barrier()
    mine, everyone = own.empty(5, torch.int64)
    mine.fill_(dist.get_rank() + 10)
    dist.barrier()
    seen = [int(other.sum()) for other in everyone]
    dist.barrier()
    everyone[(dist.get_rank() + 1) % dist.get_world_size()][0] = 7
    dist.barrier()
    return [*seen, int(mine[0]), own.nbytes], left_since(before)


def test_every_rank_reads_and_writes_every_ranks_memory(ranks: Ranks) -> None:
    for seen, left in ranks.run(3, write_and_read):
        assert seen == [50, 55, 60, 7, 40]
        assert not left


def full_on_one_rank() -> str:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    own = memory()
    with patch.object(os, "posix_fallocate", full if dist.get_rank() == 1 else os.posix_fallocate):
        try:
            own.empty(100, torch.float32)
        except UnsupportedError as error:
            return str(error)
    return "allocated"


def test_a_rank_without_memory_is_named_on_all(ranks: Ranks) -> None:
    for message in ranks.run(2, full_on_one_rank):
        assert "cannot be allocated on rank 1" in message
        assert "No space left" in message


def without_descriptors() -> tuple[list[int], list[str]]:
    """As where processes may not look into each other."""

    def refused(path: str, *args: Any) -> Any:
        if path.startswith("/proc/") and dist.get_rank() == 1:
            raise PermissionError(13, "Permission denied", path)
        return map_shared(path, *args)

    with patch.object(peer_memory, "map_shared", refused):
        return write_and_read()


def test_memory_has_a_name_where_it_needs_one(ranks: Ranks) -> None:
    for seen, left in ranks.run(2, without_descriptors):
        assert seen == [50, 55, 7, 40]
        assert not left


@contextmanager
def copying_by_itself() -> Iterator[None]:
    """ "auto" copies on a CPU, too."""

    def wanted(choice: str, *args: Any, **kwargs: Any) -> bool:
        return choice != "collective"

    with patch.object(transports, "chooses_copies", wanted):
        yield


@contextmanager
def memory_fails(nth: int, rank: int = 1) -> Iterator[None]:
    """The nth piece of memory that a rank wants.

    The probe's, the shards', that of turns, gradients', or that of weights in the dtype that is computed in.
    """
    claims, fallocate = 0, os.posix_fallocate

    def claimed(*args: Any) -> None:
        nonlocal claims
        claims += 1
        if claims == nth and dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        fallocate(*args)

    with patch.object(os, "posix_fallocate", claimed):
        yield


def trained(nth: int, choices: dict[str, str]) -> tuple[list[float], dict[str, int], int, str, list[bool]]:
    """Return after a few steps losses, counters, bytes in peers' memory, and traffic of process groups.

    Also return each measurement of the links since the engine was made, with True for copies.
    """
    torch._dynamo.reset()
    model = build(OneLayer)
    links = MagicMock(return_value=NOMINAL_COSTS)
    with (
        copying_by_itself(),
        memory_fails(nth),
        patch("lightning_zero.compile.session.measure_costs", links),
        engine_for(model, "aot_eager", **MIXED, **choices) as engine,
    ):
        batches = make_batches(OneLayer, 5, 12)
        got = train_sharded(engine, model, batches, sgd(model), context=autocast)
        measured = [call.args[1] for call in links.mock_calls]
        return (
            got.losses,
            engine.executor.counters(),
            engine.transports.nbytes,
            engine.transports.collectives_used,
            measured,
        )


def falls_back(nth: int, oracle: dict[str, str]) -> tuple[Any, Any]:
    return trained(nth, {}), trained(0, oracle)


@pytest.mark.parametrize(
    ("nth", "gather_transport", "reduce_transport"),
    [
        pytest.param(1, "collective", "collective", marks=pytest.mark.slow),
        (2, "collective", "copy"),
        pytest.param(3, "collective", "copy", marks=pytest.mark.exhaustive),
        (4, "copy", "collective"),
    ],
)
@pytest.mark.exhaustive_variants("1-collective-collective", "4-copy-collective")
def test_where_memory_runs_out_collectives_take_over(
    ranks: Ranks, nth: int, gather_transport: str, reduce_transport: str
) -> None:
    oracle = {"gather_transport": gather_transport, "reduce_transport": reduce_transport}
    for got, expected in ranks.run(2, falls_back, nth, oracle, deadline=240):
        assert got[0] == expected[0]
        same = ("copied_weights", "gathers", "reduces", "agreements", "compute_shard_writes")
        assert {name: got[1].get(name) for name in same} == {name: expected[1].get(name) for name in same}
        assert got[2:4] == expected[2:4], "half of what was wanted was left"
        assert got[4] == ([gather_transport == "copy"] if nth > 1 else []), (
            "compiled code is planned with others' costs"
        )


def test_without_memory_for_casts_weights_are_cast_when_they_are_read(ranks: Ranks) -> None:
    for got, expected in ranks.run(
        2, falls_back, 5, {"gather_transport": "copy", "reduce_transport": "copy"}, deadline=240
    ):
        assert got[0] == expected[0]
        assert got[2] < expected[2]
        assert got[3:] == expected[3:] == ("", [])


def refused(nth: int, choices: dict[str, str]) -> str:
    try:
        trained(nth, choices)
    except UnsupportedError as error:
        return str(error)
    return "it trained"


@pytest.mark.parametrize(
    ("nth", "name"),
    [(2, "gather_transport"), (3, "gather_transport"), (4, "reduce_transport"), (5, "gather_transport")],
)
def test_copies_that_were_asked_for_are_refused_by_name_on_every_rank(ranks: Ranks, nth: int, name: str) -> None:
    for message in ranks.run(2, refused, nth, COPY, deadline=240):
        assert (
            f"{name}='copy' is impossible here: memory that all ranks can read cannot be allocated on rank 1" in message
        )
        assert "No space left" in message


def with_a_stub_for_a_barrier(choice: str) -> str:
    with patch.object(SymmetricMemory, "_device_barrier", lambda self: None):
        try:
            with engine_for(None, "aot_eager", **MIXED, reduce_transport=choice) as engine:
                return engine.transports.collectives_used
        except UnsupportedError as error:
            return str(error)


def test_a_barrier_that_does_not_wait_is_not_relied_on(ranks: Ranks) -> None:
    for message in ranks.run(2, with_a_stub_for_a_barrier, "copy"):
        assert "reduce_transport='copy' is impossible here: a barrier between their devices does not wait" in message


def objections(backend: str, atomics: str) -> str | None:
    """Return GPUs of which rank 1's differs from the others."""
    mine = dist.get_rank() == 1
    with patch("lightning_zero.mesh.check_backend"):  # the ranks of this test have no GPU, and gloo
        own = SymmetricMemory(Mesh.from_world(torch.device("cuda", 0)))
    with (
        patch("torch.distributed._symmetric_memory.get_backend", lambda device: backend if mine else "CUDA"),
        patch.object(peer_memory, "gpu_uuid", lambda device: f"gpu {dist.get_rank()}"),
        patch.object(peer_memory, "no_atomics_reason", lambda device, uuids: atomics if mine else ""),
    ):
        return own._unavailable_reason()


def test_gpus_that_cannot_wait_for_each_other_are_told_on_every_rank(ranks: Ranks) -> None:
    assert ranks.run(2, objections, "CUDA", "") == [None, None]
    assert ranks.run(2, objections, "CUDA", "no atomic operations") == ["no atomic operations"] * 2
    for reason in ranks.run(2, objections, "NVSHMEM", ""):
        assert "set to 'NVSHMEM'" in str(reason)


def configured(options: dict[str, Any], other: dict[str, Any]) -> str:
    with engine_for(build("OneBlock"), "aot_eager", **MIXED, **options) as engine:
        try:
            engine.configure(replace(engine.config, tuning=replace(engine.config.tuning, **other)))
        except UnsupportedError as error:
            return str(error)
        return str(engine.session._consensus.patience_s)


@pytest.mark.parametrize(
    ("options", "other", "said"),
    [
        ({"gather_transport": "copy"}, {"gather_transport": "collective"}, "sharded with gather_transport='copy'"),
        (
            {"reduce_transport": "collective"},
            {"reduce_transport": "copy"},
            "sharded with reduce_transport='collective'",
        ),
        ({}, {"reduce_transport": "copy"}, "Pass reduce_transport='auto', or call lightning_zero.unshard(model) first"),
        ({}, {"reduce_transport": "collective", "gather_transport": "copy"}, "25.0"),  # the choice of "auto"
        ({}, {"consensus_timeout_s": 7.0}, "7.0"),
    ],
)
def test_what_a_sharded_model_cannot_follow_is_refused(
    ranks: Ranks, options: dict[str, Any], other: dict[str, Any], said: str
) -> None:
    for message in ranks.run(2, configured, options, other):
        assert said in message


def on_two_hosts(choice: str, ranks_per_host: int | None) -> tuple[str, dict[str, int]]:
    options = MIXED | {"gather_transport": choice, "ranks_per_host": ranks_per_host}
    with patch("lightning_zero.mesh.host_name", lambda: f"host {dist.get_rank()}"):
        try:
            _, counters = train_case("OneBlock", "aot_eager", 2, engine_options=options, context=autocast)
        except UnsupportedError as error:
            return str(error), {}
    return "", counters


@pytest.mark.parametrize(
    ("ranks_per_host", "reason"),
    [(None, "there is one rank on each host"), (2, "ranks 0 and 1 are on different hosts")],
)
def test_copying_between_hosts_is_refused_by_name(ranks: Ranks, ranks_per_host: int | None, reason: str) -> None:
    for message, _ in ranks.run(2, on_two_hosts, "copy", ranks_per_host):
        assert f"gather_transport='copy' is impossible here: {reason}" in message
        assert "gather_transport='auto'" in message


def lengths(rank: int) -> list[Any]:
    """Batches of other lengths on each rank."""
    return [
        tuple(part[:, : 4 + (step * (rank + 2)) % 4] for part in batch)
        for step, batch in enumerate(make_batches(OneLayer, 10, 4))
    ]


@torch.no_grad()
def edit(model: Any, step: int) -> None:
    if step == 4:
        model.blocks[0][0].weight.mul_(-30)


def lengths_differ() -> tuple[list[float], dict[str, int]]:
    """Ranks compile at different steps, evaluate in between, and change weights by hand."""
    model = build(OneLayer)
    losses = []
    with engine_for(model, "aot_eager", **MIXED, **COPY) as engine:
        optimizer = sgd(model)
        for step, batch in enumerate(lengths(engine.rank)):
            with engine.train_step(), autocast():
                edit(model, step)  # the graph has fetched it already
                loss = model.loss(batch)
            loss.backward()
            optimizer.step()
            engine.cycle.before_step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 3 == 1:
                engine.eval_step()
                with torch.no_grad(), autocast():
                    losses.append(model.loss(batch).item())
                engine.cycle.after_eval()
        return losses, engine.executor.counters()


def lengths_in_one_process(world: int, edited: bool = True) -> list[list[float]]:
    """Return the expected losses of each rank."""
    model: Any = build(OneLayer)
    optimizer = sgd(model)
    losses: list[list[float]] = [[] for _ in range(world)]
    batches = [lengths(rank) for rank in range(world)]
    for step in range(len(batches[0])):
        edit(model, step if edited else 0)
        for rank in range(world):
            with autocast():
                loss = model.loss(batches[rank][step])
            (loss / world).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(world if step % 3 == 1 else 0):
            with torch.no_grad(), autocast():
                losses[rank].append(model.loss(batches[rank][step]).item())
    return losses


@pytest.mark.exhaustive  # see test_agreement.py
def test_ranks_with_batches_of_other_lengths_train(ranks: Ranks) -> None:
    world = 3
    expected, unedited = lengths_in_one_process(world), lengths_in_one_process(world, edited=False)
    found = ranks.run(world, lengths_differ, deadline=240)
    for rank, (losses, counters) in enumerate(found):
        assert abs(unedited[rank][5] / expected[rank][5] - 1) > 0.03, "an edit that makes no difference"
        assert_close_relative(losses, expected[rank], 5e-3, what=f"losses of rank {rank}")
        assert counters["copied_weights"] > 0
        assert counters["prefetched_groups"] > 0


def poisoned() -> list[Any]:
    results = []
    for nan_fill in (False, True):
        torch._dynamo.reset()
        model = build(TiedLayer)
        with engine_for(model, "aot_eager", nan_fill=nan_fill, **MIXED, **COPY) as engine:
            results.append(
                train_sharded(engine, model, make_batches(TiedLayer, 4, 12), sgd(model), accumulate=2, context=autocast)
            )
    return results


def test_nobody_reads_what_has_not_arrived_or_is_gone(ranks: Ranks) -> None:
    for plain, other in ranks.run(2, poisoned, deadline=240):
        assert_same_bits(other, plain)


def what_is_copied() -> dict[str, int]:
    def only_compiled(model: nn.Module, index: int) -> None:
        if index == 2:  # the first step is eager
            engine_of(model).executor.reset_counters()

    options: dict[str, Any] = {"context": autocast, "before_batch": only_compiled}
    _, counters = train_case(OneLayer, "aot_eager", 6, engine_options=MIXED | COPY, **options)
    return counters


def test_compiled_code_gathers_nothing_by_collectives(ranks: Ranks) -> None:
    """Not even norms and embeddings, which autocast leaves in full precision."""
    for counters in ranks.run(2, what_is_copied, deadline=120):
        assert counters["copied_weights"] == counters["gathers"] > 0


def placed_twice() -> tuple[int, int, int, Reference]:
    model = build(OneLayer)
    params = list(model.parameters())
    with engine_for(model, "aot_eager", **MIXED, **COPY) as engine:
        optimizer = torch.optim.SGD([{"params": params[::2]}, {"params": params[1::2], "lr": 0.05}], lr=0.1)
        before, order = engine.transports.nbytes, [param.data_ptr() for param in params]
        engine.optimizers.arrange([optimizer])
        after, moved = (
            engine.transports.nbytes,
            sum(param.data_ptr() != at for param, at in zip(params, order, strict=True)),
        )
        return (
            before,
            after,
            moved,
            train_sharded(engine, model, make_batches(OneLayer, 3, 6), optimizer, context=autocast),
        )


def test_shards_that_an_optimizer_has_placed_again_take_memory_once(ranks: Ranks) -> None:
    for before, after, moved, trained in ranks.run(2, placed_twice, deadline=120):
        assert moved
        assert after == before
        assert all(map(math.isfinite, trained.losses))


def trained_with_other_options() -> list[tuple[int, float]]:
    """Return the memory that peers reach after the first step, which is eager, for each training, and its loss."""
    model, found = build(OneLayer), []
    with engine_for(model, "aot_eager", **MIXED, **COPY) as engine:
        optimizer = sgd(model)
        others = ({}, {"reduce_bucket_mb": 128.0, "compute_dtype": torch.float16}, {})
        for other, batch in zip(others, make_batches(OneLayer, len(others), 6), strict=True):
            engine.configure(config(**{"compile_backend": "aot_eager", **MIXED, **COPY, **other}))
            engine.optimizers.arrange([optimizer])
            trained = train_sharded(engine, model, [batch], optimizer, context=autocast)
            found.append((engine.transports.nbytes, trained.losses[0]))
    return found


def test_later_trainings_with_other_options_take_no_more_memory_that_peers_reach(ranks: Ranks) -> None:
    """Larger buckets use the same staging memory in more rounds, and code in another dtype reads shards."""
    for found in ranks.run(2, trained_with_other_options, deadline=120):
        assert len({nbytes for nbytes, _ in found}) == 1
        assert found[0][0] > 0
        assert all(math.isfinite(loss) for _, loss in found)


@torch.no_grad()
def halve(model: Any) -> None:
    for module in (model.head, model.norm, model.tokens):
        module.weight.mul_(0.5)


def edited_between_graphs(options: dict[str, Any]) -> tuple[list[float], dict[str, int]]:
    """Weights are changed in eager code after the step's first groups are on their way: one that is computed with in
    bfloat16, and two in full precision.
    """
    torch._dynamo.reset()
    model = build(OneLayer)
    losses = []
    with engine_for(model, "aot_eager", **MIXED, **options) as engine:
        for step, batch in enumerate(make_batches(OneLayer, 6, 4)):
            with engine.train_step(), autocast():
                if step > 2:
                    halve(model)
                loss = model.loss(shard_batch(batch, engine.rank, engine.world_size))
            loss.backward()
            losses.append(loss.item())
        return losses, engine.executor.counters()


def test_an_edit_wins_over_what_was_fetched_ahead(ranks: Ranks) -> None:
    model = build(OneLayer)
    expected: list[list[float]] = [[], []]
    for step, batch in enumerate(make_batches(OneLayer, 6, 4)):
        if step > 2:
            halve(model)
        for rank in range(2):
            with torch.no_grad(), autocast():
                expected[rank].append(model.loss(shard_batch(batch, rank, 2)).item())
    gathered = ranks.run(2, edited_between_graphs, {"gather_transport": "collective"}, deadline=120)
    copied = ranks.run(2, edited_between_graphs, {"gather_transport": "copy"}, deadline=120)
    for rank in range(2):
        assert copied[rank][1]["prefetched_groups"] > 0, "in the third step, which nothing is edited in"
        assert copied[rank][0] == gathered[rank][0]
        assert_close_relative(copied[rank][0], expected[rank], 1e-3, what=f"losses of rank {rank}")
