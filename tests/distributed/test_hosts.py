"""Ranks of several hosts: weights arrive and gradients are reduced in two steps.

The result equals that of one process.
"""

import time
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.planning.persistent_memory import persistent_bytes, shard_parameters
from lightning_zero.report.engine_report import memory_by_role, startup_summary
from tests.helpers.models import Batch, Case, build, make_batches
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

STEPS, SAMPLES, CLIP = 6, 12, 0.25  # steps of one batch
MICRO = 3  # batches for one step

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": (EAGER, {}),
    "compiled": ("aot_eager", {}),
    "by collectives": ("aot_eager", {"gather_transport": "collective", "reduce_transport": "collective"}),
    "kept, gradients by copies": ("aot_eager", {"reduce_transport": "copy", "reshard_after_forward": False}),
    "no copy per host": ("aot_eager", {"compute_shard_group": "all"}),
    "poisoned": ("aot_eager", {"nan_fill": True}),
    "replayed": ("aot_eager", {"emulate_cuda_graph_model": True, "emulate_cuda_graph_step": True}),
}
REPLICAS: dict[str, Any] = {"replicate_over": "hosts"}


class Wide(Case):
    """Every one of four ranks holds a good part of each matrix; there is little to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(23, 41)
        self.norm = nn.LayerNorm(41)
        self.middle = nn.Linear(41, 43, bias=False)
        self.head = nn.Linear(43, 37)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 23, generator=rng), 3 * torch.randn(n, 37, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.norm(torch.tanh(self.first(x))))))


@cache
def reference(world: int, accumulate: int = 1, steps: int = STEPS) -> Reference:
    with single_thread():
        batches = make_batches(Wide, steps, SAMPLES)
        return train_reference(build(Wide), batches, sgd, world=world, clip_norm=CLIP, accumulate=accumulate)


def train(
    ranks_per_host: int, backend: str, accumulate: int = 1, steps: int = STEPS, **options: Any
) -> tuple[Reference, dict[str, int], int]:
    """Return the trained weights, counters of the last step, and the bytes of all parameters with padding."""
    model = build(Wide)
    options = {"gather_group_mb": 0.02} | options  # so small that hosts exchange several parts
    with engine_for(model, backend, ranks_per_host=ranks_per_host, **options) as engine:

        def reset(model: nn.Module, index: int) -> None:
            if index == steps - accumulate:
                engine.executor.reset_counters()

        out = train_sharded(
            engine,
            model,
            make_batches(Wide, steps, SAMPLES),
            sgd(model),
            clip_norm=CLIP,
            accumulate=accumulate,
            announce=True,
            before_batch=reset,
        )
        nbytes = sum(r.shard.nbytes for r in engine.sharder.live) * engine.mesh.shard_group.size
        planned = persistent_bytes(
            shard_parameters(build(Wide), engine.mesh.shard_group.size), engine.config, engine.mesh.host_count
        )
        held = memory_by_role(engine, [])
        assert accumulate > 1 or planned == {role: held[role] for role in planned}
        return out, engine.executor.counters(), nbytes


def check(out: Reference, expected: Reference) -> None:
    for what in ("losses", "grads", "grad_norms", "params"):
        assert_close_relative(getattr(out, what), getattr(expected, what), 1e-6, what=what)


@pytest.mark.parametrize(
    ("world_size", "ranks_per_host", "way"),
    [
        # "poisoned" is "compiled" and more, and "replayed" begins as it; micro-batches of it alone cross below
        *((4, 2, way) for way in WAYS if way != "compiled"),
        *((2, 1, way) for way in ("eager", "replayed")),
        (3, 1, "compiled"),
        pytest.param(4, 1, "no copy per host", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive_variants(
    "4-2-kept, gradients by copies", "4-2-poisoned", "2-1-replayed", "3-1-compiled", "4-2-eager"
)
def test_training_over_hosts_equals_one_process(ranks: Ranks, world_size: int, ranks_per_host: int, way: str) -> None:
    backend, options = WAYS[way]
    out, counters, _ = ranks.run(world_size, train, ranks_per_host, backend, **options)[0]
    expected = reference(world_size)
    assert min(expected.grad_norms) > CLIP
    check(out, expected)
    assert ("copied_weights" in counters) == (
        ranks_per_host > 1 and way not in ("eager", "by collectives", "no copy per host")
    )
    assert ("replayed_graphs" in counters) == (way == "replayed")
    # On a host of one rank, compiled code reads the exchanged weights in place.
    assert ("gathers" in counters) == (ranks_per_host > 1 or way in ("eager", "no copy per host"))


@pytest.mark.parametrize(
    ("world_size", "ranks_per_host", "way"),
    [
        (4, 2, "replayed"),
        (2, 1, "compiled"),
        (3, 1, "compiled"),
        *(pytest.param(4, 2, way, marks=pytest.mark.slow) for way in ("eager", "kept, gradients by copies")),
        *(pytest.param(4, 2, way, marks=pytest.mark.exhaustive) for way in ("by collectives", "poisoned")),
        pytest.param(3, 1, "replayed", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive_variants("2-1-compiled", "3-1-compiled", "4-2-kept, gradients by copies")
def test_replicas_on_all_hosts_equal_one_process_and_each_other(
    ranks: Ranks, world_size: int, ranks_per_host: int, way: str
) -> None:
    backend, options = WAYS[way]
    found = ranks.run(world_size, train, ranks_per_host, backend, **REPLICAS | options)
    expected = reference(world_size)
    for out, counters, nbytes in found:
        check(out, expected)
        assert_same_bits(out, found[0][0])
        assert out.grad_norms == found[0][0].grad_norms
        assert "gather_bytes_across" not in counters
        assert counters["reduce_bytes_across"] == 2 * nbytes // ranks_per_host
        assert ("replayed_graphs" in counters) == (way == "replayed")


@pytest.mark.parametrize(
    ("options", "gathers", "reductions"),
    [
        # an all-reduce goes there and back
        (REPLICAS | {"cross_host_reduce": "step"}, 0, 2),
        pytest.param(REPLICAS, 0, 2 * MICRO, marks=pytest.mark.slow),
        ({"cross_host_reduce": "step"}, 1, 1),
        ({}, 1, MICRO),
        ({"compute_shard_group": "all", "cross_host_reduce": "step"}, 2 * MICRO, 1),  # in forward and in backward
    ],
    ids=[
        "replicas, once per step",
        "replicas, each micro-batch",
        "once per step",
        "gradients of each micro-batch",
        "weights of each gather",
    ],
)
@pytest.mark.exhaustive_variants("replicas, each micro-batch", "gradients of each micro-batch", "once per step")
def test_what_crosses_hosts_in_a_step(ranks: Ranks, options: dict[str, Any], gathers: int, reductions: int) -> None:
    out, counters, nbytes = ranks.run(4, train, 2, "aot_eager", MICRO, **options)[0]
    check(out, reference(4, MICRO))
    assert counters["reduce_bytes_across"] == reductions * nbytes // 2
    if gathers <= 1:
        assert counters.get("gather_bytes_across", 0) == gathers * nbytes // 2
    else:  # in backward the middle one: small weights and the last one stay; the first one's input needs no gradient
        middle = 4 * 4 * 448  # bytes, with the padding of four ranks
        assert counters["gather_bytes_across"] == MICRO * (nbytes + middle) // 2


@pytest.mark.parametrize(
    ("world_size", "ranks_per_host", "way"),  # "compiled" on two hosts of two: count transfers once per step
    [
        *((4, 2, way) for way in ("eager", "replayed", "kept, gradients by copies")),
        *((3, 1, way) for way in ("eager", "replayed")),
    ],
)
@pytest.mark.exhaustive_variants("4-2-kept, gradients by copies", "3-1-replayed")
def test_accumulated_micro_batches_are_reduced_across_hosts_once(
    ranks: Ranks, world_size: int, ranks_per_host: int, way: str
) -> None:
    backend, options = WAYS[way]
    steps = 5 * MICRO if way == "replayed" else STEPS  # each of three micro-batches is captured in its second turn
    out, counters, nbytes = ranks.run(
        world_size, train, ranks_per_host, backend, MICRO, steps, cross_host_reduce="step", **options
    )[0]
    check(out, reference(world_size, MICRO, steps))
    assert counters["reduce_bytes_across"] == nbytes // ranks_per_host
    assert counters.get("replayed_graphs", 0) == (2 * MICRO if way == "replayed" else 0)


def timed(gbs: float) -> tuple[Reference, float, float]:
    """Return a training over a slow network, its seconds, and the least seconds of its transfers between hosts."""
    begun = time.monotonic()
    out, counters, _ = train(1, "aot_eager", steps=2, emulate_cross_host_gb_per_s=gbs)
    taken = time.monotonic() - begun
    crossed = sum(counters[f"{what}_bytes_across"] for what in ("gather", "reduce")) / 2  # the other host's half
    return out, taken, crossed / (1e9 * gbs)


@pytest.mark.exhaustive  # the other tests here count the traffic
def test_an_emulated_network_is_as_slow_as_asked_and_changes_nothing(ranks: Ranks) -> None:
    for out, taken, least in ranks.run(2, timed, 1e-5):
        check(out, reference(2, steps=2))
        assert least > 0.3
        assert taken > least


def alone() -> tuple[list[float], dict[str, int], str]:
    model = build(Wide)
    with engine_for(model, EAGER, **REPLICAS) as engine:
        out = train_sharded(engine, model, make_batches(Wide, STEPS, SAMPLES)[:2], sgd(model), clip_norm=CLIP)
        return out.losses, engine.executor.counters(), startup_summary(engine, [])


def test_on_one_host_there_is_nothing_to_replicate_and_one_line_says_so(ranks: Ranks) -> None:
    losses, counters, said = ranks.run(2, alone)[0]
    assert_close_relative(losses, reference(2).losses[:2], 1e-6)
    assert "reduce_bytes_across" not in counters
    assert "replicate_over changes nothing on one host" in said


def zeroed(set_to_none: bool) -> Tensor | None:
    """The gradients of a first micro-batch are dropped; return those of the second one."""
    model = build(Wide)
    first, second = make_batches(Wide, 2, SAMPLES)
    with engine_for(model, EAGER, ranks_per_host=1, cross_host_reduce="step") as engine:
        for batch, more in ((first, True), (second, False)):
            with engine.cycle.accumulating() if more else nullcontext():
                with engine.train_step():
                    loss = model.loss(shard_batch(batch, engine.rank, engine.world_size))
                loss.backward()
            if more:
                assert engine.executor.gradients.has_deferred()
                assert not any(grad.any() for grad in whole_grads(engine, model).values() if grad is not None)
                model.zero_grad(set_to_none)
        return whole_grads(engine, model)["head.weight"]


def test_gradients_that_were_dropped_between_micro_batches_do_not_come_back(ranks: Ranks) -> None:
    batches = make_batches(Wide, 2, SAMPLES)
    expected = build(Wide)
    expected.loss(batches[1]).backward()
    (got, _) = ranks.run(2, zeroed, True)
    assert_close_relative(got, expected.get_parameter("head.weight").grad, 1e-6)


def test_gradients_that_were_changed_between_micro_batches_are_refused_by_name(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"was changed between micro-batches.*set_to_none=True"):
        ranks.run(2, zeroed, False)


def stepped_early(backend: str) -> Reference:
    """The micro-batch announced as last is not the last: the optimizer steps before it."""
    model = build(Wide)
    with engine_for(model, backend, ranks_per_host=1, cross_host_reduce="step") as engine:
        optimizer, out = sgd(model), Reference()
        for batch in make_batches(Wide, STEPS, SAMPLES):
            with engine.cycle.accumulating():
                with engine.train_step():
                    loss = model.loss(shard_batch(batch, engine.rank, engine.world_size))
                loss.backward()
            with engine.optimizers.stepping(optimizer, clip=CLIP) as norm:
                out.grad_norms.append(norm.item())
                optimizer.step()
            optimizer.zero_grad()
            out.params.append(whole_params(engine, model))
        assert engine.executor.counters()["deferred_reductions"] == STEPS
        return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_comes_early_has_all_gradients(ranks: Ranks, backend: str) -> None:
    out, expected = ranks.run(2, stepped_early, backend)[0], reference(2)
    assert_close_relative(out.grad_norms, expected.grad_norms, 1e-6)
    assert_close_relative(out.params, expected.params, 1e-6)


def hooked() -> dict[str, int]:
    model = build(Wide)
    with engine_for(model, EAGER, ranks_per_host=1, cross_host_reduce="step") as engine:
        seen = []
        with engine.registered_parameters():
            model.head.weight.register_hook(lambda grad: seen.append(grad.norm().item()))
        train_sharded(engine, model, make_batches(Wide, MICRO, SAMPLES), sgd(model), accumulate=MICRO, announce=True)
        assert len(seen) == MICRO, seen
        assert all(seen), seen
        return engine.executor.counters()


def test_hooks_see_the_gradient_of_each_micro_batch(ranks: Ranks) -> None:
    ranks.run(2, hooked)


@pytest.mark.parametrize(("world_size", "ranks_per_host", "sizes"), [(3, 2, "2, 1"), (4, 3, "3, 1")])
def test_hosts_of_other_sizes_are_refused_by_name(
    ranks: Ranks, world_size: int, ranks_per_host: int, sizes: str
) -> None:
    with pytest.raises(RankFailure, match=rf"(?s)UnsupportedError: The 2 hosts .* have {sizes} ranks.*WORLD_SIZE"):
        ranks.run(world_size, train, ranks_per_host, EAGER)


def evaluated(ranks_per_host: int) -> tuple[list[float], list[int]]:
    """Losses of batches, evaluated after a step, and after an edit; how often hosts had exchanged weights by then."""
    model = build(Wide)
    batches = make_batches(Wide, 3, SAMPLES)
    losses, exchanges = [], []
    with engine_for(model, "aot_eager", ranks_per_host=ranks_per_host) as engine:
        train_sharded(engine, model, batches, sgd(model))
        engine.executor.reset_counters()
        model.eval()
        for edited in (False, True):
            if edited:
                next(model.parameters()).data.mul_(1.5)
            for batch in batches:
                engine.eval_step()
                with torch.no_grad():
                    losses.append(model.loss(batch).item())
                engine.cycle.after_eval()
            exchanges.append(engine.executor.counters()["host_shard_refreshes"])
    return losses, exchanges


def test_an_evaluation_exchanges_weights_once_and_once_more_after_an_edit(ranks: Ranks) -> None:
    plain = build(Wide)
    batches, expected = make_batches(Wide, 3, SAMPLES), []
    train_plain(plain, batches, sgd(plain), world=2)
    with torch.no_grad():
        for edited in (False, True):
            if edited:
                next(plain.parameters()).mul_(1.5)
            expected += [plain.loss(batch).item() for batch in batches]
    assert min(abs(a - b) for a, b in zip(expected[:3], expected[3:], strict=True)) > 1e-4
    for losses, exchanges in ranks.run(2, evaluated, 1):
        assert_close_relative(losses, expected, 1e-5)
        assert exchanges == [1, 2]
