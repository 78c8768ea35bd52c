"""Weights that stay until the optimizer steps.

The same results, fewer gathers, and never an old value.
"""

from functools import partial
from typing import Any

import pytest
import torch

from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.module_patching import UNSHARDED_CACHE
from lightning_zero.sharding.param_record import Role
from tests.helpers.models import Case, OneLayer, TiedLayer, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative, assert_same_bits
from tests.helpers.sharded import engine_for, sgd, train_plain, train_sharded, whole_params
from tests.ranks.pool import Ranks

BF16 = torch.bfloat16
WINDOWS, ACCUMULATE = 3, 4
STEP: dict[str, Any] = {"unsharded_cache_mb": float("inf"), "unsharded_cache_until": "step", "gather_group_mb": 0.02}


def with_and_without(case: str | type[Case], mixed: bool, backend: str) -> list[tuple[Reference, dict[str, int]]]:
    options: dict[str, Any] = {"compute_dtype": BF16, "reduce_dtype": BF16} if mixed else {}
    context = partial(torch.autocast, "cpu", BF16, enabled=mixed, cache_enabled=False)
    results = []
    for chosen in ({"gather_group_mb": 0.02}, STEP):
        torch._dynamo.reset()
        model = build(case)
        with engine_for(model, backend, small_bytes=0, **options, **chosen) as engine:
            batches = make_batches(case, WINDOWS * ACCUMULATE, 12)
            # The first window is over once everything is compiled.
            train_sharded(engine, model, batches[:ACCUMULATE], sgd(model), accumulate=ACCUMULATE, context=context)
            engine.executor.reset_counters()
            out = train_sharded(engine, model, batches[ACCUMULATE:], sgd(model), accumulate=ACCUMULATE, context=context)
            results.append((out, engine.executor.counters()))
    return results


@pytest.mark.parametrize(
    ("case", "backend", "mixed"),
    [
        pytest.param(TiedLayer, "aot_eager", True, marks=pytest.mark.slow),
        ("LoRA", "aot_eager", False),
        ("NeverUsed", "aot_eager", False),
    ],
)
@pytest.mark.exhaustive_variants("TiedLayer-aot_eager-True", "LoRA-aot_eager-False")
def test_accumulation_is_bitwise_the_same_and_gathers_once(
    ranks: Ranks, case: str | type[Case], backend: str, mixed: bool
) -> None:
    for (expected, usual), (out, cached) in ranks.run(2, with_and_without, case, mixed, backend, deadline=240):
        assert_same_bits(out, expected)
        # Kept weights: once in each of the windows; without, twice in each micro-batch.
        assert cached["cached_gathers"] % (WINDOWS - 1) == 0
        weights = cached["cached_gathers"] // (WINDOWS - 1)
        saved = usual["gathers"] - cached["gathers"]
        forwards = (WINDOWS - 1) * (ACCUMULATE - 1) * weights
        assert saved >= forwards > 0


def kept_within(megabytes: float) -> tuple[list[str], int, int, Reference]:
    """Return the cached weights' names and bytes, the gathered bytes of a step, and the training."""
    torch._dynamo.reset()
    model = build("CalledTwice")
    with engine_for(model, "aot_eager", small_bytes=0, **STEP | {"unsharded_cache_mb": megabytes}) as engine:
        batches, optimizer = make_batches("CalledTwice", 6, 12), sgd(model)
        out = train_sharded(engine, model, batches, optimizer, accumulate=2)
        cached = {
            view.untyped_storage().data_ptr(): view.untyped_storage().nbytes()
            for view in engine.sharder.memory.tensors(Role.UNSHARDED_CACHE)
        }
        names = [
            r.name
            for r in engine.sharder.live
            for owner, key in r.owners
            if key in owner.__dict__.get(UNSHARDED_CACHE, {})
        ]
        return names, sum(cached.values()), engine.executor.counters().get("cached_gathers", 0), out


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_no_more_is_kept_than_the_budget_allows(ranks: Ranks, share: float) -> None:
    """In the order of registration; weights that do not fit are skipped."""
    model = build("CalledTwice")
    sizes = {
        name: ShardLayout.from_shape(p.shape, p.dtype, 2).shard_numel * 2 * 4 for name, p in model.named_parameters()
    }
    budget = left = int(share * sum(sizes.values()))
    expected = []
    for name, size in sizes.items():
        if size <= left:
            left -= size
            expected.append(name)
    expected_params = train_plain(model, make_batches("CalledTwice", 6, 12), sgd(model), world=2, accumulate=2).params
    for names, nbytes, gathered, out in ranks.run(2, kept_within, budget / 2**20):
        assert sorted(set(names)) == sorted(expected)
        assert nbytes == sum(sizes[name] for name in expected) <= budget
        assert gathered > 0
        assert_close_relative(out.params, expected_params, 1e-6, atol=2e-8, what="params")


def change_between() -> list[bool]:
    """Compare reads after each kind of change with the values of a plain model."""
    model, plain = build(OneLayer), build(OneLayer)
    batch = make_batches(OneLayer, 1, 12)[0]
    other = build(OneLayer, seed=3).state_dict()
    same = []
    with engine_for(model, "aot_eager", **STEP) as engine:

        def compare() -> None:
            with engine.train_step():
                loss = model.loss(batch)
            loss.backward()
            with torch.no_grad():
                same.append(torch.allclose(loss, plain.loss(batch), rtol=1e-5))

        compare()
        compare()
        model.load_state_dict(other)
        plain.load_state_dict(other)
        compare()
        with engine.full_parameters(), torch.no_grad():
            model.head.weight.mul_(1.5)
        with torch.no_grad():
            plain.head.weight.mul_(1.5)
        compare()
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                mine.mul_(0.7)  # as an average of weights is put in place
                theirs.mul_(0.7)
        compare()
        engine.eval_step()
        with torch.no_grad():
            same.append(torch.allclose(model.loss(batch), plain.loss(batch), rtol=1e-5))
        for param in model.parameters():
            param.grad = None
        engine.cycle.before_step()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mine.data.mul_(0.9)  # a step that leaves no trace, but is announced
            theirs.data.mul_(0.9)
        compare()
        assert engine.executor.counters()["cached_gathers"] > 0
        whole_params(engine, model)
    return same


@pytest.mark.parametrize("world_size", [2])
def test_changed_weights_are_gathered_again(ranks: Ranks, world_size: int) -> None:
    for same in ranks.run(world_size, change_between):
        assert all(same), same


def unshard_and_train() -> None:
    model = build("NeverUsed")
    with engine_for(model, "aot_eager", **STEP) as engine:
        train_sharded(engine, model, make_batches("NeverUsed", 3, 12), sgd(model))
        assert any("_zero_unsharded_cache" in module.__dict__ for module in model.modules())
        engine.unshard()
        assert not any("_zero_unsharded_cache" in module.__dict__ for module in model.modules())
        model.loss(make_batches("NeverUsed", 1, 12)[0]).backward()


def test_a_plain_module_keeps_nothing(ranks: Ranks) -> None:
    ranks.run(2, unshard_and_train)
