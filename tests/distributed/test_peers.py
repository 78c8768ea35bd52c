"""Weights copied out of peers' memory, and gradients into it: what could go wrong with memory that others read."""

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.engine import engine_of
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding import peers
from lightning_zero.sharding.peers import PeerMemory
from tests.helpers.models import build, make_batches
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import engine_for, sgd, train_case, train_sharded
from tests.ranks.pool import Ranks

BF16 = torch.bfloat16
MIXED: dict[str, Any] = {"compute_dtype": BF16, "reduce_dtype": BF16, "gather_group_mb": 0.01}
COPY: dict[str, Any] = {"gather_by": "copy", "reduce_by": "copy"}
autocast = partial(torch.autocast, "cpu", BF16, cache_enabled=False)


def memory() -> PeerMemory:
    ranks = list(range(dist.get_world_size()))
    return PeerMemory(dist.new_group(ranks), dist.new_group(ranks), torch.device("cpu"))


def write_and_read() -> tuple[list[int], list[str]]:
    own = memory()
    before = set(Path("/dev/shm").iterdir())
    dist.barrier()
    mine, everyone = own.empty(5, torch.int64)
    mine.fill_(dist.get_rank() + 10)
    dist.barrier()
    seen = [int(other.sum()) for other in everyone]
    dist.barrier()
    everyone[(dist.get_rank() + 1) % dist.get_world_size()][0] = 7
    dist.barrier()
    return [*seen, int(mine[0]), own.nbytes], [path.name for path in set(Path("/dev/shm").iterdir()) - before]


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


def on_two_hosts(choice: str) -> tuple[str, dict[str, int]]:
    with patch.object(peers, "_host", lambda: f"host {dist.get_rank()}"):
        try:
            _, counters = train_case(
                "OneBlock", "aot_eager", 2, engine_options=MIXED | {"gather_by": choice}, context=autocast
            )
        except UnsupportedError as error:
            return str(error), {}
    return "", counters


def test_copying_between_hosts_is_refused_by_name(ranks: Ranks) -> None:
    for message, _ in ranks.run(2, on_two_hosts, "copy"):
        assert "gather_by='copy' is impossible here: ranks 0 and 1 are on different hosts" in message
        assert "gather_by='auto'" in message


def without_mixed_precision() -> str:
    try:
        train_case("OneBlock", "aot_eager", 2, engine_options={"gather_by": "copy"})
    except UnsupportedError as error:
        return str(error)
    return ""


def test_without_mixed_precision_there_is_nothing_to_copy(ranks: Ranks) -> None:
    for message in ranks.run(2, without_mixed_precision):
        assert "only compiled code with mixed precision" in message


def lengths_differ() -> tuple[list[float], dict[str, int]]:
    """Ranks compile at different steps, evaluate in between, and change weights by hand."""
    model = build("TinyTransformer")
    losses = []
    with engine_for(model, "aot_eager", **MIXED, **COPY) as engine:
        optimizer = sgd(model)
        for step, batch in enumerate(make_batches("TinyTransformer", 10, 4)):
            length = 4 + (step * (dist.get_rank() + 2)) % 4
            batch = tuple(part[:, :length] for part in batch)
            with engine.train_step(), autocast():
                if step == 4:
                    with torch.no_grad():
                        model.blocks[0].mlp[0].weight.clamp_(-0.1, 0.1)  # the graph has fetched it already
                loss = model.loss(batch)
            loss.backward()
            optimizer.step()
            engine.before_step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 3 == 1:
                engine.eval_step()
                with torch.no_grad(), autocast():
                    losses.append(model.loss(batch).item())
                engine.after_eval()
        return losses, engine.executor.counters()


def test_ranks_with_batches_of_other_lengths_train(ranks: Ranks) -> None:
    for world in (2, 3):
        for losses, counters in ranks.run(world, lengths_differ, deadline=240):
            assert all(loss == loss for loss in losses)
            assert counters["copied_weights"] > 0
            assert counters["groups_ahead"] > 0


def poisoned(case: str) -> list[Any]:
    results = []
    for poison in (False, True):
        torch._dynamo.reset()
        model = build(case)
        with engine_for(model, "aot_eager", poison=poison, **MIXED, **COPY) as engine:
            results.append(
                train_sharded(engine, model, make_batches(case, 4, 12), sgd(model), accumulate=2, context=autocast)
            )
    return results


@pytest.mark.parametrize("case", ["TiedBlock", "LoRA"])
def test_nobody_reads_what_has_not_arrived_or_is_gone(ranks: Ranks, case: str) -> None:
    for plain, other in ranks.run(2, poisoned, case, deadline=240):
        assert other.losses == plain.losses


def what_is_copied() -> dict[str, int]:
    def only_compiled(model: nn.Module, index: int) -> None:
        if index == 2:  # the first step is eager
            engine_of(model).executor.reset_counters()

    options: dict[str, Any] = {"context": autocast, "before_batch": only_compiled}
    _, counters = train_case("OneBlock", "aot_eager", 6, engine_options=MIXED | COPY, **options)
    return counters


def test_compiled_code_gathers_nothing_by_collectives(ranks: Ranks) -> None:
    """Not even norms and embeddings, which autocast leaves in full precision."""
    for counters in ranks.run(2, what_is_copied, deadline=120):
        assert counters["copied_weights"] == counters["gathers"] > 0


def edited_between_graphs(options: dict[str, Any]) -> list[float]:
    """Weights are changed in eager code after the step's first groups are on their way: one that is computed with in
    bfloat16, and two in full precision."""
    torch._dynamo.reset()
    model = build("OneBlock")
    losses = []
    with engine_for(model, "aot_eager", **MIXED, **options) as engine:
        for step, batch in enumerate(make_batches("OneBlock", 5, 4)):
            with engine.train_step(), autocast():
                if step > 1:
                    with torch.no_grad():
                        for module in (model.head, model.norm, model.tokens):
                            module.weight.mul_(0.5)
                loss = model.loss(batch)
            loss.backward()
            losses.append(loss.item())
    return losses


def test_an_edit_wins_over_what_was_fetched_ahead(ranks: Ranks) -> None:
    gathered = ranks.run(2, edited_between_graphs, {}, deadline=120)
    copied = ranks.run(2, edited_between_graphs, {"gather_by": "copy"}, deadline=120)
    assert copied == gathered
    assert_close_relative(copied[0], gathered[0], 0.0, what="losses")
