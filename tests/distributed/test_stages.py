"""Stages 1 and 2: weights are gathered once per optimizer step, gradients reduced per micro-batch or once, and the result
is that of one process."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.sharding.param_record import Role
from tests.helpers.models import TiedLayer, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative, assert_same_bits, shard_batch, train_reference
from tests.helpers.sharded import (
    BACKENDS,
    EAGER,
    engine_for,
    sgd,
    single_thread,
    train_plain,
    train_sharded,
    whole_grads,
    whole_params,
)
from tests.ranks.pool import RankFailure, Ranks

STEPS, SAMPLES, CLIP = 3, 12, 0.25  # optimizer steps
MICRO = 3  # batches for one step
STAGES = (1, 2)

COLLECTIVES = {"gather_transport": "collective", "reduce_transport": "collective"}
REPLAYED = {"emulate_cuda_graph_model": True, "emulate_cuda_graph_step": True}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": (EAGER, {}),
    "eager, by collectives": (EAGER, COLLECTIVES),
    "compiled": ("aot_eager", {}),
    "by collectives": ("aot_eager", COLLECTIVES),
    "gradients by copies, poisoned": ("aot_eager", {"reduce_transport": "copy", "nan_fill": True}),
    "replayed": ("aot_eager", REPLAYED),
    "replayed, state on the host": ("aot_eager", REPLAYED | {"offload": ("optimizer",), "offload_buffer_mb": 0.001}),
}

Trained = tuple[Reference, dict[str, int], int]


@cache
def reference(world: int, steps: int = STEPS, accumulate: int = MICRO) -> Reference:
    with single_thread():
        batches = make_batches(TiedLayer, steps * accumulate, SAMPLES)
        return train_reference(build(TiedLayer), batches, sgd, world=world, clip_norm=CLIP, accumulate=accumulate)


def train(stage: int, backend: str, steps: int, **options: Any) -> Trained:
    """Return the trained weights, counters of the last step, and the bytes of all parameters with padding."""
    model = build(TiedLayer)
    with engine_for(model, backend, stage=stage, **options) as engine:

        def reset(model: nn.Module, index: int) -> None:
            if index == (steps - 1) * MICRO:
                engine.executor.reset_counters()

        batches, told = make_batches(TiedLayer, steps * MICRO, SAMPLES), {"announce": True, "before_batch": reset}
        out = train_sharded(engine, model, batches, sgd(model), clip_norm=CLIP, accumulate=MICRO, **told)  # type: ignore[arg-type]
        nbytes = sum(r.shard.nbytes for r in engine.sharder.live) * engine.mesh.shard_group.size
        return out, engine.executor.counters(), nbytes


def train_both(backend: str, steps: int, **options: Any) -> list[Trained]:
    return [train(stage, backend, steps, **options) for stage in STAGES]


def check(out: Reference, expected: Reference) -> None:
    assert min(expected.grad_norms) > CLIP
    for what in ("losses", "grads", "grad_norms", "params"):
        assert_close_relative(getattr(out, what), getattr(expected, what), 1e-6, what=what)


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        *((2, way) for way in ("eager", "eager, by collectives", "by collectives", "replayed, state on the host")),
        (1, "eager"),
        (3, "eager"),
        (3, "compiled"),
        pytest.param(2, "gradients by copies, poisoned", marks=pytest.mark.slow),
        pytest.param(3, "replayed", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive_variants("3-*", "2-gradients by copies, poisoned")
def test_accumulated_training_equals_one_process_and_moves_no_more_than_it_must(
    ranks: Ranks, world_size: int, way: str
) -> None:
    backend, options = WAYS[way]
    steps = 5 if way.startswith("replayed") else STEPS  # each of three micro-batches is captured in its second turn
    both = ranks.run(world_size, train_both, backend, steps, **options)[0]
    for stage, (out, counters, nbytes) in zip(STAGES, both, strict=True):
        check(out, reference(world_size, steps))
        if world_size > 1:  # one rank keeps no copies of whole shards
            assert counters["gather_bytes"] == nbytes
        reductions = 1 if stage == 1 and world_size > 1 else MICRO
        assert counters["reduce_bytes"] == reductions * nbytes
        assert counters.get("agreements", 0) == (reductions if world_size > 1 else 0)
        assert ("replayed_graphs" in counters) == way.startswith("replayed")


@pytest.mark.parametrize("way", ["eager", "replayed"])  # the first steps of the latter run compiled code
@pytest.mark.exhaustive_variants("replayed")
def test_between_hosts_weights_and_gradients_travel_once_per_step(ranks: Ranks, way: str) -> None:
    backend, options = WAYS[way]
    steps = 5 if way.startswith("replayed") else STEPS
    both = ranks.run(4, train_both, backend, steps, ranks_per_host=2, **options)[0]
    for stage, (out, counters, nbytes) in zip(STAGES, both, strict=True):
        check(out, reference(4, steps))
        reductions = 1 if stage == 1 else MICRO
        assert counters["gather_bytes"] == nbytes
        assert counters["gather_bytes_across"] == nbytes // 2
        assert counters["reduce_bytes"] == reductions * nbytes
        assert counters["reduce_bytes_across"] == reductions * nbytes // 2


@pytest.mark.exhaustive  # test_hosts.py counts transfers between hosts
@pytest.mark.parametrize(("world_size", "ranks_per_host"), [(4, 2), (2, 1)])
def test_of_replicas_only_gradients_travel_between_hosts(ranks: Ranks, world_size: int, ranks_per_host: int) -> None:
    options: dict[str, Any] = {"ranks_per_host": ranks_per_host, "replicate_over": "hosts"}
    both = ranks.run(world_size, train_both, "aot_eager", STEPS, **options)[0]
    for stage, (out, counters, nbytes) in zip(STAGES, both, strict=True):
        check(out, reference(world_size))
        reductions = 1 if stage == 1 else MICRO
        if ranks_per_host > 1:
            assert counters["gather_bytes"] == nbytes
        else:
            assert counters["gather_bytes"] < nbytes, "shards that are whole weights are read in place"
        assert "gather_bytes_across" not in counters
        assert counters["reduce_bytes"] == reductions * nbytes
        assert counters["reduce_bytes_across"] == reductions * 2 * nbytes // ranks_per_host


def in_mixed_precision(backend: str, stages: Sequence[int]) -> list[tuple[Reference, int, int]]:
    """Return by stage: weights trained without accumulation; bytes gathered in the last step; bytes of cached weights
    with padding.
    """
    found = []
    for stage in stages:
        model = build(TiedLayer)
        with engine_for(model, backend, stage=stage, compute_dtype=torch.bfloat16) as engine:

            def reset(model: nn.Module, index: int, engine: Engine = engine) -> None:
                engine.executor.reset_counters()

            autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
            batches = make_batches(TiedLayer, STEPS, SAMPLES)
            out = train_sharded(engine, model, batches, sgd(model), context=autocast, before_batch=reset)
            kept = [r for r in engine.sharder.live if Role.UNSHARDED_CACHE in r.memory]
            sizes = [
                engine.world_size * r.layout.shard_numel * r.memory[Role.UNSHARDED_CACHE].element_size() for r in kept
            ]
            dtypes = {r.memory[Role.UNSHARDED_CACHE].dtype for r in kept}
            assert dtypes == ({torch.bfloat16, torch.float32} if stage == 2 else set())
            found.append((out, engine.executor.counters()["gather_bytes"], sum(sizes)))
    return found


def test_what_autocast_leaves_in_full_precision_stays_so_and_is_cast_where_it_is(ranks: Ranks) -> None:
    """An embedding that is tied to the head is read in both dtypes."""
    (second, gathered, kept), (third, _, _) = ranks.run(2, in_mixed_precision, "aot_eager", (2, 3))[0]
    assert_same_bits(second, third)
    assert gathered == kept


@pytest.mark.exhaustive
def test_generated_code_casts_it_too(ranks: Ranks) -> None:
    [(found, gathered, kept)] = ranks.run(1, in_mixed_precision, "inductor", (2,), deadline=240)[0]
    [(wanted, _, _)] = ranks.run(1, in_mixed_precision, "aot_eager", (2,))[0]
    assert_close_relative(found.losses, wanted.losses, 1e-3, what="losses")
    assert gathered == kept


def accumulated(engine: Engine, model: Any, batch: Any, more: bool) -> None:
    with engine.cycle.accumulating() if more else nullcontext():
        with engine.train_step():
            loss = model.loss(shard_batch(batch, engine.rank, engine.world_size))
        loss.backward()


def zeroed(set_to_none: bool) -> Tensor | None:
    """The gradients of a first micro-batch are dropped; return those of the second one."""
    model = build(TiedLayer)
    first, second = make_batches(TiedLayer, 2, SAMPLES)
    with engine_for(model, EAGER, stage=1) as engine:
        accumulated(engine, model, first, more=True)
        assert engine.executor.gradients.has_deferred()
        assert not any(grad.any() for grad in whole_grads(engine, model).values() if grad is not None)
        model.zero_grad(set_to_none)
        accumulated(engine, model, second, more=False)
        return whole_grads(engine, model)["tokens.weight"]


def test_gradients_that_were_dropped_between_micro_batches_do_not_come_back(ranks: Ranks) -> None:
    expected = build(TiedLayer)
    expected.loss(make_batches(TiedLayer, 2, SAMPLES)[1]).backward()
    (got, _) = ranks.run(2, zeroed, True)
    assert_close_relative(got, expected.get_parameter("tokens.weight").grad, 1e-6)


def test_gradients_that_were_changed_between_micro_batches_are_refused_by_name(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"was changed between micro-batches.*\(stage=1\).*pass stage=2"):
        ranks.run(2, zeroed, False)


def stepped_early(backend: str) -> Reference:
    """The micro-batch announced as last is not the last: the optimizer steps before it."""
    model = build(TiedLayer)
    with engine_for(model, backend, stage=1) as engine:
        optimizer, out = sgd(model), Reference()
        for batch in make_batches(TiedLayer, STEPS, SAMPLES):
            accumulated(engine, model, batch, more=True)
            with engine.optimizers.stepping(optimizer, clip=CLIP) as norm:
                out.grad_norms.append(norm.item())
                optimizer.step()
            optimizer.zero_grad()
            out.params.append(whole_params(engine, model))
        assert engine.executor.counters()["deferred_reductions"] == STEPS
        return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_comes_early_has_all_gradients(ranks: Ranks, backend: str) -> None:
    out, expected = ranks.run(2, stepped_early, backend)[0], reference(2, STEPS, accumulate=1)
    assert_close_relative(out.grad_norms, expected.grad_norms, 1e-6)
    assert_close_relative(out.params, expected.params, 1e-6)


def hooked() -> None:
    model = build(TiedLayer)
    with engine_for(model, EAGER, stage=1) as engine:
        seen = []
        with engine.registered_parameters():
            model.norm.weight.register_hook(lambda grad: seen.append(grad.norm().item()))  # type: ignore[union-attr, operator]
        batches = make_batches(TiedLayer, MICRO, SAMPLES)
        train_sharded(engine, model, batches, sgd(model), accumulate=MICRO, announce=True)
        assert len(seen) == MICRO, seen
        assert all(seen), seen


def test_hooks_see_the_gradient_of_each_micro_batch(ranks: Ranks) -> None:
    ranks.run(2, hooked)


class Experts(nn.Module):
    """In the first micro-batch of a step only rank 0 has tokens for the second expert, in the others no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = (nn.Linear(8, 8) for _ in range(3))

    def loss(self, x: Tensor, routed: bool) -> Tensor:
        y = self.first(x)
        return (self.second(y) if routed else y).square().mean()


def routed(early: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(4, 8)
    with engine_for(model, EAGER, stage=1) as engine:
        for number in range(2):
            with engine.cycle.accumulating() if early or number == 0 else nullcontext():
                with engine.train_step():
                    loss = model.loss(x[2 * engine.rank :][:2], number == 0 and engine.rank == 0)
                loss.backward()
        engine.cycle.finalize_gradients()
        return whole_grads(engine, model)


@pytest.mark.parametrize("early", [False, True])
def test_ranks_agree_on_what_has_a_gradient_when_it_is_reduced(ranks: Ranks, early: bool) -> None:
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(4, 8)
    for number in range(2):
        for rank in range(2):
            (model.loss(x[2 * rank :][:2], number == 0 and rank == 0) / 2).backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    for got in ranks.run(2, routed, early):
        assert_close_relative(got, expected, 1e-6)


def interrupted() -> Reference:
    """An exception ends the backward of a second micro-batch; the step is begun anew."""
    model = build(TiedLayer)
    batches = make_batches(TiedLayer, MICRO, SAMPLES)

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError

    with engine_for(model, EAGER, stage=1) as engine:
        accumulated(engine, model, batches[0], more=True)
        with engine.cycle.accumulating(), pytest.raises(ArithmeticError):
            with engine.train_step():
                inside = model.tokens(shard_batch(batches[1][0], engine.rank, 2))  # type: ignore[operator]
                inside.register_hook(fail)
                loss = model.head(model.norm(inside)).sum()  # type: ignore[operator]
            loss.backward()
        engine.cycle.reset()
        model.zero_grad()
        optimizer = sgd(model)
        return train_sharded(engine, model, batches, optimizer, clip_norm=CLIP, accumulate=MICRO, announce=True)


def test_what_an_interrupted_backward_brought_does_not_count(ranks: Ranks) -> None:
    check(ranks.run(2, interrupted)[0], reference(2, 1))


def edit(model: nn.Module, index: int) -> None:
    if index % MICRO == 1:
        with torch.no_grad():
            model.norm.weight.mul_(1.5)  # type: ignore[union-attr, operator]


def edited(backend: str, options: dict[str, Any]) -> Reference:
    model = build(TiedLayer)
    with engine_for(model, backend, stage=2, **options) as engine:
        batches = make_batches(TiedLayer, 2 * MICRO, SAMPLES)
        return train_sharded(engine, model, batches, sgd(model), accumulate=MICRO, announce=True, before_batch=edit)


@pytest.mark.parametrize("way", ["eager", "eager, by collectives", "by collectives"])
def test_in_place_edits_between_micro_batches_reach_weights_that_stay(ranks: Ranks, way: str) -> None:
    with single_thread():
        model = build(TiedLayer)
        batches = make_batches(TiedLayer, 2 * MICRO, SAMPLES)
        expected = train_plain(model, batches, sgd(model), world=2, accumulate=MICRO, before_batch=edit)
    out = ranks.run(2, edited, *WAYS[way])[0]
    for what in ("losses", "grads", "params"):
        assert_close_relative(getattr(out, what), getattr(expected, what), 1e-6, what=what)


def changed(backend: str) -> tuple[Reference, list[set[str]]]:
    """Train with another stage from step to step, and from one micro-batch to the next.

    Return the memory after each step.
    """
    model = build(TiedLayer)
    held: list[set[str]] = []
    stages = iter([3, 1, 1, 1, 2, 2, 1, 3, 3])
    with engine_for(model, backend, reshard_after_forward=True) as engine:
        first = engine.config

        def configure(model: nn.Module, index: int) -> None:
            if index % MICRO == 0:
                held.append({role.value for role in Role if engine.sharder.memory.tensors(role)})
            engine.configure(replace(first, stage=next(stages)))

        out = train_sharded(
            engine,
            model,
            make_batches(TiedLayer, STEPS * MICRO, SAMPLES),
            sgd(model),
            clip_norm=CLIP,
            accumulate=MICRO,
            announce=True,
            before_batch=configure,
        )
        held.append({role.value for role in Role if engine.sharder.memory.tensors(role)})
        return out, held


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_stage_is_applied_at_any_time_and_memory_is_given_back(ranks: Ranks, backend: str) -> None:
    out, held = ranks.run(2, changed, backend)[0]
    check(out, reference(2))
    kept, waits = Role.UNSHARDED_CACHE.value, Role.DEFERRED_GRADIENT.value
    assert [(kept in roles, waits in roles) for roles in held] == [
        (False, False),
        (True, True),
        (True, False),
        (False, False),
    ]


def by_hand() -> tuple[dict[str, Tensor | None], int]:
    """All of a step inside ``train_step``, as manual optimization has it."""
    model, count = build(TiedLayer), 0
    with engine_for(model, EAGER, stage=1) as engine:
        with engine.train_step():
            for number, batch in enumerate(make_batches(TiedLayer, MICRO, SAMPLES)):
                with engine.cycle.accumulating() if number + 1 < MICRO else nullcontext():
                    loss = model.loss(shard_batch(batch, engine.rank, engine.world_size))
                    (loss / MICRO).backward()
                count += engine.executor.counters().get("agreements", 0)
        return whole_grads(engine, model), count


def test_micro_batches_inside_one_training_step_are_reduced_once(ranks: Ranks) -> None:
    for got, agreements in ranks.run(2, by_hand):
        assert_close_relative(got, reference(2, 1).grads[0], 1e-6)
        assert agreements == 1
