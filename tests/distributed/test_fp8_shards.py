"""Weights gathered in fp8: training equals an eager one that casts master weights, with half the bytes and memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.report.engine_report import startup_summary
from lightning_zero.sharding.param_record import Role
from tests.helpers.fp8_model import ACCUMULATE, CLIP, FP8_LAYERS, OPTIONS, STEPS, Model, evaluate, loss_of, train_plain
from tests.helpers.fp8_oracle import Fp8Linear, with_fp8_layers
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import engine_for, sgd, train_step, whole_params
from tests.ranks.pool import Ranks

SHARDS: dict[str, Any] = OPTIONS | {"fp8_shards": True, "gather_transport": "collective"}
FP8_WEIGHTS = {f"{layer}.weight" for layer in FP8_LAYERS}
NOT_GATHERED = "weight_underflow", "weight_overflow"  # of numbers that no rank has
TRANSPORTS = pytest.mark.parametrize("transport", ["collective", "copy"])

Edit = Callable[[nn.Module], None]


def enlarge(model: nn.Module) -> None:
    """Write to a weight between steps, far beyond the range of its last factor."""
    with torch.no_grad():
        model.get_submodule("blocks.1.up").weight.mul_(64)  # type: ignore[operator]


def factors(engine: Engine) -> dict[str, Tensor]:
    records = {record.name: record for record in engine.sharder.live if Role.FP8_SHARD in record.memory}
    return {name: torch.ops.lightning_zero.weight_factor(record.shard) for name, record in records.items()}


def roles(engine: Engine, role: Role) -> set[str]:
    return {record.name for record in engine.sharder.live if role in record.memory}


def step(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    train_step(engine, optimizer, partial(loss_of, model, index))


def train(edit: Edit | None = None, **options: Any) -> dict[str, Any]:
    """Train on this rank's shards, all ranks with equal batches; evaluate, and call ``edit``, after each step."""
    model = Model()
    losses = []
    with engine_for(model, **SHARDS | options) as engine:
        optimizer = sgd(model)
        for index in range(STEPS * ACCUMULATE):
            engine.executor.reset_counters()
            with engine.train_step():
                loss = loss_of(model, index)
            (loss / ACCUMULATE).backward()
            losses.append(loss.item())
            counters = engine.executor.counters()
            if index % ACCUMULATE:
                with engine.optimizers.stepping(optimizer, clip=CLIP):
                    optimizer.step()
                optimizer.zero_grad()
                if edit is not None:
                    edit(model)
                engine.eval_step()
                losses.append(evaluate(model))
        return {
            "losses": losses,
            "params": whole_params(engine, model),
            "factors": factors(engine),
            "graphs": engine.session.plans.plan.graphs,
            "counters": counters,
            "compute": roles(engine, Role.COMPUTE_SHARD),
            "fp8": roles(engine, Role.FP8_SHARD),
            "summary": startup_summary(engine, [optimizer]),
            "health": None if engine.fp8_health is None else engine.fp8_health.read(),
        }


def oracle(edit: Edit | None = None) -> dict[str, Any]:
    def after_step(model: nn.Module, index: int) -> list[float]:
        if edit is not None:
            edit(model)
        return [evaluate(model)]

    return train_plain(after_step, of_masters=True)


def gathered_bytes(found: dict[str, Any], kind: str) -> dict[str, tuple[str, int]]:
    """Return dtype and bytes of each weight that the first graph of a kind gathers alone."""
    [graph, *_] = [graph for graph in found["graphs"] if graph.kind == kind]
    return {gather.weights[0]: (gather.dtype, gather.bytes) for gather in graph.gathers if len(gather.weights) == 1}


def assert_half_is_gathered(found: dict[str, Any], in_16_bits: dict[str, Any]) -> None:
    """Forward and backward gather one byte for each element of an fp8 weight instead of two, and nothing else."""
    less = 0
    for kind in ("forward", "backward"):
        now, before = gathered_bytes(found, kind), gathered_bytes(in_16_bits, kind)
        assert {name for name, (dtype, _) in now.items() if dtype == "float8_e4m3fn"} == FP8_WEIGHTS
        assert {name: (dtype, size / 2) for name, (dtype, size) in before.items() if name in FP8_WEIGHTS} == {
            name: ("bfloat16", size) for name, (_, size) in now.items() if name in FP8_WEIGHTS
        }
        less += sum(size for name, (_, size) in now.items() if name in FP8_WEIGHTS)
    assert in_16_bits["counters"]["gather_bytes"] - found["counters"]["gather_bytes"] == less


def variants(transport: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    replays = {"emulate_cuda_graph_model": True, "emulate_cuda_graph_step": True, "fp8_health_every": 1}
    found = [train(gather_transport=transport, **options) for options in ({}, {"fp8_shards": False}, replays)]
    return found[0], found[1], found[2]


def loss_under_bf16() -> float:
    model = Model()
    with engine_for(model, **SHARDS) as engine:
        torch.set_default_dtype(torch.bfloat16)
        with engine.train_step():
            torch.set_default_dtype(torch.float32)
            return loss_of(model, 0).item()


def test_factors_are_float32_in_steps_of_bf16_true(ranks: Ranks) -> None:
    # Lightning makes bfloat16 the default before such a step begins.
    assert ranks.run(1, loss_under_bf16) == [pytest.approx(oracle()["losses"][0], rel=1e-5)]


@pytest.mark.parametrize(
    ("world_size", "transport"), [(1, "collective"), (2, "collective"), (3, "collective"), (2, "copy"), (3, "copy")]
)
@pytest.mark.exhaustive_variants("2-collective", "2-copy")
def test_training_equals_an_eager_one_that_casts_master_weights(ranks: Ranks, world_size: int, transport: str) -> None:
    expected = oracle()
    for found, in_16_bits, replayed in ranks.run(world_size, variants, transport, deadline=240.0):
        assert_close_relative(found["losses"], expected["losses"], 1e-6, what="losses")
        assert_close_relative(found["params"], expected["params"], 1e-6, atol=1e-8, what="weights")
        # Replays read the fp8 shards at the same addresses.
        assert replayed["losses"] == found["losses"]
        assert replayed["counters"]["replayed_graphs"] >= 2
        health = {name: x for name, x in expected["health"].items() if not name.endswith(NOT_GATHERED)}
        assert_close_relative(replayed["health"], health, 1e-6, atol=1e-12, what="health")
        # All ranks have the factors of the unsharded weights, to the bit.
        for name, factor in found["factors"].items():
            assert torch.equal(factor, found["params"][name].abs().amax() * (1 / 448)), name
        if world_size == 1:  # graphs read the copies themselves
            assert not any(graph.gathers for graph in found["graphs"])
        else:
            assert_half_is_gathered(found, in_16_bits)
        # Weights that are gathered in fp8 have no compute shard in bfloat16.
        assert found["fp8"] == FP8_WEIGHTS
        how = "read" if world_size == 1 else "gathered"
        assert f"{len(FP8_WEIGHTS)} weights are {how} in fp8" in found["summary"]
        assert not found["compute"] & FP8_WEIGHTS
        assert {"tokens.weight", "kept.weight", "router.weight"} <= found["compute"]
        assert found["counters"].get("fp8_shard_writes", 0) == 0  # all were written at once


def train_with_edits() -> dict[str, Any]:
    return train(enlarge)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_weight_written_between_steps_gets_a_new_factor(ranks: Ranks, world_size: int) -> None:
    expected = oracle(enlarge)
    for found in ranks.run(world_size, train_with_edits, deadline=120.0):
        assert_close_relative(found["losses"], expected["losses"], 1e-6, what="losses")
        assert_close_relative(found["params"], expected["params"], 1e-6, atol=1e-8, what="weights")


def write_in_a_forward(transport: str) -> list[Any]:
    """Return losses of a forward after a write that no call has announced, and what a clamped cast gives."""
    model = Model()
    with engine_for(model, **SHARDS | {"gather_transport": transport}) as engine:
        optimizer = sgd(model)
        for index in range(3):
            step(engine, model, optimizer, index)
        engine.eval_step()
        before = evaluate(model)
        name = "blocks.1.up.weight"
        weight, factor = whole_params(engine, model)[name], factors(engine)[name]
        enlarge(model)
        after = evaluate(model)  # without eval_step(), which computes new factors
        with torch.no_grad():
            limit = weight.abs().amax().item()
            clamped = (64 * weight).clamp(-limit, limit)
            model.get_submodule("blocks.1.up").weight.copy_(clamped)  # type: ignore[operator]
        expected = evaluate(model)
        assert torch.equal(factor, factors(engine)[name])
        return [before, after, expected]


@TRANSPORTS
def test_an_unannounced_write_saturates_until_the_next_step(ranks: Ranks, transport: str) -> None:
    for before, after, expected in ranks.run(2, write_in_a_forward, transport, deadline=120.0):
        assert after == expected != before


def step_twice(transport: str) -> dict[str, Any]:
    """Step within a training step, and run another forward before it ends."""
    model = Model()
    losses = []
    with engine_for(model, **SHARDS | {"gather_transport": transport}) as engine:
        optimizer = sgd(model)
        for index in range(3):
            with engine.train_step():
                for part in range(2):
                    loss = loss_of(model, 2 * index + part)
                    loss.backward()
                    losses.append(loss.item())
                    with engine.optimizers.stepping(optimizer):
                        optimizer.step()
                    optimizer.zero_grad()
        return {"losses": losses}


@TRANSPORTS
def test_a_forward_after_a_step_in_the_same_training_step_reads_new_weights(ranks: Ranks, transport: str) -> None:
    model = with_fp8_layers(Model(), FP8_LAYERS)
    optimizer = sgd(model)
    losses = []
    Fp8Linear.of_masters = True
    try:
        for index in range(6):
            Fp8Linear.on = index > 1
            loss = loss_of(model, index)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        Fp8Linear.on = Fp8Linear.of_masters = False
    for found in ranks.run(2, step_twice, transport, deadline=120.0):
        assert_close_relative(found["losses"], losses, 1e-6, what="losses")


def save_and_load(transport: str) -> list[float]:
    """Return losses: at a checkpoint, after later steps, after loading, and in another engine after its first step."""
    model = Model()
    found = []

    def evaluated(engine: Engine, model: nn.Module) -> float:
        engine.eval_step()
        return evaluate(model)

    with engine_for(model, **SHARDS | {"gather_transport": transport}) as engine:
        optimizer = sgd(model)
        for index in range(3):
            step(engine, model, optimizer, index)
        weights = {name: value.clone() for name, value in whole_params(engine, model).items()}
        weights["head.weight"] = weights["tokens.weight"]
        found.append(evaluated(engine, model))
        for _ in range(2):
            enlarge(model)
            step(engine, model, optimizer, 3)
        found.append(evaluated(engine, model))
        with engine.overwriting_weights():
            model.load_state_dict(weights)
        found.append(evaluated(engine, model))
    other = Model()
    other.load_state_dict(weights)
    with engine_for(other, **SHARDS | {"gather_transport": transport}) as engine:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
        for index in range(2):
            step(engine, other, optimizer, index)
        found.append(evaluated(engine, other))
    return found


@TRANSPORTS
def test_loaded_weights_get_their_own_factors(ranks: Ranks, transport: str) -> None:
    for at_save, later, loaded, resumed in ranks.run(2, save_and_load, transport, deadline=120.0):
        assert at_save == loaded == resumed != later


def fail_to_load(transport: str) -> list[float]:
    """Return losses of a training step after a load that fails when it has written, and after one that does not."""
    model = Model()
    losses = []
    with engine_for(model, **SHARDS | {"gather_transport": transport}) as engine:
        optimizer = sgd(model)
        for index in range(3):
            step(engine, model, optimizer, index)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        name = "blocks.1.up.weight"
        for fails in (True, False):
            with suppress(ZeroDivisionError), engine.overwriting_weights():
                model.load_state_dict(weights | {name: 64 * weights[name]})
                if fails:
                    raise ZeroDivisionError
            with engine.train_step():
                losses.append(loss_of(model, 3).item())
            engine.cycle.reset()
            with engine.overwriting_weights():
                model.load_state_dict(weights)
    return losses


@TRANSPORTS
def test_weights_of_a_load_that_failed_get_their_own_factors(ranks: Ranks, transport: str) -> None:
    for failed, loaded in ranks.run(2, fail_to_load, transport, deadline=120.0):
        assert failed == loaded


def train_with_a_memory_limit() -> dict[str, Any]:
    return train(memory=1000.0)


def test_a_memory_plan_keeps_gathers_in_16_bits_and_the_summary_says_so(ranks: Ranks) -> None:
    [found] = ranks.run(1, train_with_a_memory_limit, deadline=120.0)
    assert "fp8_shards=True changes nothing, because memory=1000.0" in found["summary"]
    assert not found["fp8"]
    assert "float8_e4m3fn" not in {gather.dtype for graph in found["graphs"] for gather in graph.gathers}


def with_a_broken_weight(value: float) -> float:
    """Return the loss after one element of a weight, in one rank's shard, has become NaN or infinity."""
    model = Model()
    with engine_for(model, **SHARDS) as engine:
        optimizer = sgd(model)
        for index in range(3):
            step(engine, model, optimizer, index)
        with torch.no_grad():
            model.get_submodule("blocks.1.up").weight[0, 0] = value  # type: ignore[operator,index]
        engine.eval_step()
        return evaluate(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_makes_the_loss_nan_on_all_ranks(ranks: Ranks, value: float) -> None:
    assert all(loss != loss for loss in ranks.run(2, with_a_broken_weight, value, deadline=120.0))


def train_in_16_bits_later(transport: str) -> list[set[str]]:
    """Return the weights with a compute shard before and after a change of options."""
    model = Model()
    found = []
    with engine_for(model, **SHARDS | {"gather_transport": transport}) as engine:
        optimizer = sgd(model)
        for options in (engine.config, replace(engine.config, linear_dtype=None)):
            engine.cycle.begin_stage()
            engine.configure(options)
            for index in range(4):
                step(engine, model, optimizer, index)
            found.append(roles(engine, Role.COMPUTE_SHARD))
    return found


@TRANSPORTS
def test_weights_get_compute_shards_if_later_graphs_gather_them_in_16_bits(ranks: Ranks, transport: str) -> None:
    for before, after in ranks.run(2, train_in_16_bits_later, transport, deadline=120.0):
        assert not before & FP8_WEIGHTS
        assert after == before | FP8_WEIGHTS
