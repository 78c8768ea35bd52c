"""Ranks read shards in each other's memory, with other weights and at other times.

A rank sees the writes of others at the same point of the program.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import engine_for, sgd, whole_params
from tests.helpers.spread import check_spread
from tests.helpers.turns import CHOICES, Parts, batches
from tests.ranks.pool import RankFailure, Ranks

LATE_S = 0.2  # a rank that is this late shows if the others waited


class Whole(Parts):
    def loss(self, x: Tensor, chosen: list[int], times: int) -> Tensor:
        return self.inner(x, chosen, times).square().mean()


def expected_after(make: Callable[[], Any], world_size: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    model, states = make(), []
    optimizer = sgd(model)
    for batch, choices in zip(batches(world_size), CHOICES, strict=True):
        for rank in range(world_size):
            (model.loss(batch[rank], *choices[rank]) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append({name: param.detach().clone() for name, param in model.named_parameters()})
    return states


def train(make: Callable[[], Any], backend: str, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    model, states = make(), []
    with engine_for(model, backend, **options) as engine:
        check_spread(engine, model)
        optimizer = sgd(model)
        data = batches(engine.world_size)
        for batch, choices in zip(data, CHOICES, strict=True):
            with engine.train_step():
                loss = model.loss(batch[engine.rank], *choices[engine.rank])
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            states.append(whole_params(engine, model))
    return states


EAGERLY = (Whole, "eager", {})
PARTS = (Parts, "aot_eager", {})
WHOLE = (Whole, "aot_eager", {"nan_fill": True})
ONE_SIDED = (Parts, "aot_eager", {"reduce_transport": "copy"})


@pytest.mark.parametrize(
    ("world_size", "make", "backend", "options"),
    [
        pytest.param(2, *EAGERLY, id="2-eager"),
        pytest.param(3, *EAGERLY, id="3-eager"),
        pytest.param(2, *PARTS, id="2-parts"),
        pytest.param(2, *WHOLE, id="2-whole", marks=pytest.mark.slow),
        pytest.param(3, *ONE_SIDED, id="3-one-sided", marks=pytest.mark.slow),
    ],
)
@pytest.mark.exhaustive_variants("2-whole", "3-one-sided")
def test_ranks_that_call_other_modules_train_as_if_they_had_no_gradients_there(
    ranks: Ranks, world_size: int, make: Callable[[], Any], backend: str, options: dict[str, Any]
) -> None:
    expected = expected_after(make, world_size)
    for found in ranks.run(world_size, train, make, backend, options, deadline=120):
        assert_close_relative(found, expected, 2e-5)


def test_without_such_memory_they_are_told_within_seconds(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="RankMismatchError|RankFailedError|ranks differ"):
        ranks.run(2, train, Whole, "eager", {"gather_transport": "collective"}, deadline=60)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(19, 12, batch_first=True), nn.Linear(12, 13)

    def loss(self, x: Tensor, chosen: list[int], times: int) -> Tensor:
        lengths = torch.tensor([6, 5, 3, 2, 2, 1]) + times
        steps = x[:, None].repeat(1, int(lengths.max()), 1)
        packed = nn.utils.rnn.pack_padded_sequence(steps, lengths, batch_first=True)
        return self.out(self.rnn(packed)[1][0][0]).square().mean()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.exhaustive_variants("eager")
def test_recurrent_modules_read_their_weights_once_per_time_step_and_lengths_differ(ranks: Ranks, backend: str) -> None:
    expected = expected_after(Packed, 2)
    for found in ranks.run(2, train, Packed, backend, {}, deadline=120):
        assert_close_relative(found, expected, 2e-5)


# -- evaluation


def uneven_evaluation(backend: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(19, 25), nn.Tanh(), nn.Linear(25, 19))
    with engine_for(model, backend, compute_dtype=torch.bfloat16 if backend == "aot_eager" else None) as engine:
        optimizer = sgd(model)
        data = batches(2)
        outputs = []
        for step in range(3):
            with engine.train_step():
                loss = model(data[step, engine.rank]).square().mean()
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            # rank 1 has one batch, of another size; rank 0 has four
            for number in range(4 if engine.rank == 0 else 1):
                with torch.no_grad():
                    engine.eval_step()
                    outputs.append(model(data[number, 0, : 6 - engine.rank]))
                    engine.cycle.after_eval()
            if engine.rank == 0:
                time.sleep(LATE_S / 4)
        return outputs, whole_params(engine, model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_evaluations_of_other_lengths_end_and_see_whole_weights(ranks: Ranks, backend: str) -> None:
    (zero, params), (one, others) = ranks.run(2, uneven_evaluation, backend, deadline=120)
    assert_close_relative(params, others, 0)
    assert (len(zero), len(one)) == (12, 3)
    for step in range(3):
        assert_close_relative(zero[4 * step][:5], one[step], 1e-6, what=f"outputs after step {step}")


# -- who writes waits for who reads, and the other way round


@contextmanager
def sharded(options: dict[str, Any]) -> Iterator[tuple[Engine, nn.Linear]]:
    torch.manual_seed(5)
    layer = nn.Linear(25, 26)
    with engine_for(layer, "eager", **options) as engine:
        yield engine, layer


def write_data(engine: Engine, layer: nn.Linear) -> None:
    layer._parameters["weight"].data.mul_(2)


def write_parameter(engine: Engine, layer: nn.Linear) -> None:
    with torch.no_grad():
        layer._parameters["weight"].mul_(2)


def write_list(engine: Engine, layer: nn.Linear) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(layer.parameters()), 2)


def write_gathered(engine: Engine, layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def write_gathered_data(engine: Engine, layer: nn.Linear) -> None:
    layer.weight.data.mul_(2)


def assign_gathered_data(engine: Engine, layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 2


def load(engine: Engine, layer: nn.Linear) -> None:
    layer.load_state_dict({name: 2 * value for name, value in _first_values().items()})


def write_whole(engine: Engine, layer: nn.Linear) -> None:
    with engine.full_parameters():
        layer.weight.data.mul_(2)


def step(engine: Engine, layer: nn.Linear) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for param in layer.parameters():
        with no_shard_dispatch():
            param.grad = -param.detach().clone()
    with engine.optimizers.stepping(optimizer):
        optimizer.step()


def _first_values() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return nn.Linear(25, 26).state_dict()


WRITES = [
    write_data,
    write_parameter,
    write_list,
    write_gathered,
    write_gathered_data,
    assign_gathered_data,
    load,
    write_whole,
    step,
]


def read_before_and_after(write: Callable[[Engine, nn.Linear], None], late_rank: int) -> tuple[Tensor, Tensor, Tensor]:
    with sharded({}) as (engine, layer):
        first = layer.weight.detach().clone()
        dist.barrier()
        if engine.rank == late_rank:
            time.sleep(LATE_S)
        before = layer.weight.detach().clone()
        if engine.rank == late_rank:
            time.sleep(LATE_S)
        write(engine, layer)
        return first, before, layer.weight.detach().clone()


@pytest.mark.parametrize("write", WRITES, ids=[write.__name__ for write in WRITES])
@pytest.mark.exhaustive_variants("assign_gathered_data")
def test_what_is_written_is_seen_from_there_on_and_not_before(
    ranks: Ranks, write: Callable[[Engine, nn.Linear], None]
) -> None:
    expected = _first_values()["weight"]
    for late_rank in (0, 1):
        for first, before, after in ranks.run(2, read_before_and_after, write, late_rank):
            assert torch.equal(first, expected)
            assert torch.equal(before, expected)
            assert torch.equal(after, 2 * expected)


def only_rank_0_reads() -> Tensor | None:
    with sharded({}) as (engine, layer):
        step(engine, layer)
        out = layer.weight.detach().clone() if engine.rank == 0 else None
        dist.barrier()
        for _ in range(3):
            with engine.train_step():
                loss = layer(torch.ones(2, 25)).mean()
            loss.backward()
            step(engine, layer)
        assert torch.equal(layer.weight, 16 * _first_values()["weight"])
        return out


def test_one_rank_may_read_alone(ranks: Ranks) -> None:
    out, none = ranks.run(2, only_rank_0_reads)
    assert none is None
    assert torch.equal(out, 2 * _first_values()["weight"])


def begun_again() -> Tensor:
    with sharded({}) as (engine, layer):
        for _ in range(1 + 2 * engine.rank):  # as after an exception at another step on each rank
            engine.executor.begin_training_step()
        engine.executor.begin_stage()
        with engine.train_step():
            loss = layer(torch.ones(2, 25)).mean()
        loss.backward()
        step(engine, layer)
        return layer.weight.detach().clone()


def test_a_stage_begins_alike_wherever_the_one_before_ended(ranks: Ranks) -> None:
    for found in ranks.run(2, begun_again, deadline=40):
        assert torch.equal(found, 2 * _first_values()["weight"])
