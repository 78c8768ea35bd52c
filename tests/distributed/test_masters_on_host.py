"""`offload=("optimizer", "parameters")`.

Training is the same to the last bit with master weights on the host.
"""

import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.errors import HostMemoryError, UnsupportedError
from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.offload.staging_ring import StagingRing
from tests.helpers.masters import (
    ANEW,
    AWAY,
    BF16,
    LEAVE,
    OPTIMIZERS,
    Mixed,
    away_names,
    check,
    planned,
    train,
    train_both_ways,
    two_groups,
)
from tests.helpers.sharded import engine_for
from tests.ranks.pool import Ranks

CAPTURED = {"emulate_cuda_graph_step": True}
REPLAYED = CAPTURED | {"emulate_cuda_graph_model": True, "unsharded_cache_mb": 1.0}


@pytest.mark.parametrize(
    ("world_size", "name", "options"),
    [
        (1, "AdamW", CAPTURED),
        pytest.param(2, "AdamW", REPLAYED, marks=pytest.mark.slow),
        pytest.param(2, "SGD", CAPTURED | {"ranks_per_host": 1, "replicate_over": "hosts"}, marks=pytest.mark.slow),
        # Copies add gradients in the order of ranks; a collective of three adds in an order that depends on addresses.
        pytest.param(3, "SGD", {"reduce_transport": "copy"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.exhaustive_variants("2-SGD-options2", "3-SGD-options3", "1-AdamW-options0")
def test_training_is_the_same_to_the_last_bit(
    ranks: Ranks, world_size: int, name: str, options: dict[str, Any]
) -> None:
    for here, away in ranks.run(world_size, train_both_ways, name, deadline=300, **options):
        check(here, away)
        assert away["captured"] == here["captured"] == ("emulate_cuda_graph_step" in options)
        if name == "AdamW" and not options.get("unsharded_cache_mb"):
            # Only steps write copies, unless other code has changed masters.
            anew = {step: names for step, names in enumerate(away["stale"]) if names}
            assert list(anew) == ANEW
            assert anew[9] == anew[10] == ["frozen.weight"], "others were stepped, and written, after the edit"


def planned_and_by_hand(name: str, **options: Any) -> tuple[Any, Any, Any]:
    away, here = {**planned(name), **options}, {**options, "memory": 1.0, "gather_transport": "auto", "steps": 1}
    return train(False, name, **away), train(True, name, **options), train(False, name, **here)


@pytest.mark.parametrize(
    ("world_size", "name", "options"),
    [
        pytest.param(1, "AdamW", CAPTURED, marks=pytest.mark.slow),
        (2, "SGD", {"steps": 4}),
        pytest.param(2, "AdamW", REPLAYED, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive_variants("1-AdamW-options0")
def test_a_plan_that_needs_it_is_the_same_as_by_hand(
    ranks: Ranks, world_size: int, name: str, options: dict[str, Any]
) -> None:
    for plan, by_hand, plenty in ranks.run(world_size, planned_and_by_hand, name, deadline=300, **options):
        assert plan["offload"] == by_hand["offload"] == ("optimizer", "parameters")
        assert plan["away"] == by_hand["away"] == sorted(LEAVE)
        assert plan["plan"].fits
        assert plan["plan"].limit < plenty["plan"].peak
        for what in ("stale", "roles", "captured"):
            assert plan[what] == by_hand[what]
        for what in ("record", "params", "state"):
            torch.testing.assert_close(plan[what], by_hand[what], rtol=0, atol=0)
        assert (plenty["away"], plenty["offload"]) == ([], ()), "where there is room nothing moves"


def rings_of_two_plans(**options: Any) -> list[int]:
    """Bytes of the device that rings hold after each step, of which the last follows a plan that offloads activations, too."""
    made, allocated = [], StagingRing.allocated

    def noted(ring: StagingRing) -> Tensor:
        is_new, memory = ring.nbytes == 0, allocated(ring)
        if is_new:
            made.append((StorageWeakRef(memory.untyped_storage()), memory.nbytes))
        return memory

    held: list[int] = []
    model = Mixed()
    gc.disable()
    try:
        with (
            patch.object(StagingRing, "allocated", noted),
            engine_for(model, "aot_eager", compute_dtype=BF16, **AWAY, **options) as engine,
        ):
            with engine.registered_parameters():
                optimizer = OPTIMIZERS["AdamW"](model)
            engine.optimizers.arrange([optimizer])
            for step in range(5):
                if step == 4:
                    more = replace(engine.config, offload=(*AWAY["offload"], "activations"))
                    engine.optimizers.configure(more)
                with engine.train_step(), torch.autocast("cpu", BF16, cache_enabled=False):
                    loss = model(torch.arange(12)).float().square().mean()
                engine.cycle.before_backward()
                loss.backward()
                engine.cycle.after_backward()
                with engine.optimizers.stepping(optimizer, clip=0.2):
                    optimizer.step()
                optimizer.zero_grad()
                held.append(sum(nbytes for storage, nbytes in made if not storage.expired()))
    finally:
        gc.enable()
    return held


@pytest.mark.parametrize("options", [{}, CAPTURED], ids=["own", "captured"])
def test_a_later_plan_holds_one_ring_and_not_that_of_the_plan_before_as_well(
    ranks: Ranks, options: dict[str, Any]
) -> None:
    [held] = ranks.run(1, rings_of_two_plans, **options)
    assert min(held) > 0
    assert held == held[:1] * 5


def with_other_options_later() -> list[Any]:
    limit = planned()
    buffer = {"offload_buffer_mb": limit["offload_buffer_mb"]}
    return [
        train(True, later=AWAY | {"memory": 1.0}, steps=4),
        *(
            train(False, later=later | buffer, steps=4, **limit)
            for later in ({"memory": 1.0}, {"offload": AWAY["offload"]})
        ),
    ]


def test_what_a_plan_has_put_there_stays_under_a_later_trainer(ranks: Ranks) -> None:
    [(by_hand, *others)] = ranks.run(1, with_other_options_later, deadline=240)
    for other in others:
        assert other["offload"] == ("optimizer", "parameters")
        assert other["away"] == by_hand["away"] == sorted(LEAVE)
        for what in ("params", "state"):
            torch.testing.assert_close(other[what], by_hand[what], rtol=0, atol=0)


def where_it_may_not_leave() -> list[Any]:
    """Move masters by an option, or after training has begun."""
    found = []
    for chosen in ({"offload": ("optimizer",)}, {"gather_transport": "copy"}):
        found.append(train(False, steps=1, **planned() | chosen))
    return [*found, train(False, later=planned() | {"gather_transport": "collective"}, steps=2)]


def test_plans_leave_masters_where_users_or_a_training_have_put_them(ranks: Ranks) -> None:
    for by_hand, copied, late in ranks.run(2, where_it_may_not_leave, deadline=240):
        for found in (by_hand, copied, late):
            assert found["away"] == []
            assert not found["plan"].fits
        assert by_hand["plan"].before == copied["plan"].before == ()
        assert late["plan"].before == ("optimizer", "parameters")


def before_and_after_an_evaluation() -> list[bool]:
    """Return if a rank reads another rank's shards, and if these may still move to the host."""
    with engine_for(Mixed(), compute_dtype=BF16, memory=1.0) as engine:
        memory, weights = engine.sharder.memory, engine.executor.weights
        before = [weights.uses_epoch_lock(), memory.can_move_to_host]
        engine.eval_step()
        return [*before, weights.uses_epoch_lock(), memory.can_move_to_host]


def test_whoever_evaluates_first_need_not_come_along_with_other_ranks(ranks: Ranks) -> None:
    for found in ranks.run(2, before_and_after_an_evaluation):
        assert found == [False, True, True, False]


def no_memory(numel: int, dtype: torch.dtype) -> Any:
    raise HostMemoryError("nothing left")


def fails_on_rank_1() -> str:
    limit, model = planned(), Mixed()
    with engine_for(model, compute_dtype=BF16, **limit) as engine:
        mine = partial(patch.object, HostMemory, "mapped")
        with mine(staticmethod(no_memory)) if engine.rank == 1 else nullcontext(), engine.registered_parameters():
            optimizer = torch.optim.AdamW(two_groups(model))
            with pytest.raises(HostMemoryError) as caught:
                engine.optimizers.arrange([optimizer])
        assert away_names(engine) == set()
    return str(caught.value)


def test_where_one_rank_has_no_memory_for_them_all_say_so(ranks: Ranks) -> None:
    for message in ranks.run(2, fails_on_rank_1):
        assert "Pass offload=('optimizer',) to keep them" in message
        assert message.endswith("on rank 1: nothing left")


def refuse() -> list[str]:
    found = []
    cases: list[dict[str, Any]] = [
        {"offload": ("parameters",), "compute_dtype": BF16},
        AWAY | {"compute_dtype": BF16, "compile": False},
        AWAY,
        AWAY | {"compute_dtype": BF16, "gather_transport": "copy"},
        AWAY | {"compute_dtype": BF16, "ranks_per_host": 1},
    ]
    for options in cases:
        with pytest.raises(UnsupportedError) as caught, engine_for(nn.Linear(8, 8), **options):
            pass
        found.append(str(caught.value))
    with engine_for(nn.Linear(8, 8), compute_dtype=BF16, **AWAY) as engine:
        before = engine.config
        for offload in (("optimizer",), ()):
            with pytest.raises(UnsupportedError) as caught:
                engine.configure(type(before)(offload=offload, compute_dtype=BF16, tuning=before.tuning))
            found.append(str(caught.value))
    return found


def test_where_masters_cannot_leave_it_is_refused_with_what_to_do(ranks: Ranks) -> None:
    for state, eager, dtype, copy, hosts, *later in ranks.run(2, refuse):
        assert "Pass offload=('optimizer', 'parameters')." in state
        assert "Leave compile at True, or 'parameters' out." in eager
        assert "Pass precision='bf16-mixed' or '16-mixed'" in dtype
        assert "gather_transport='copy' is impossible here: offload= stores master weights on the host" in copy
        assert "over several hosts (2 here)" in hosts
        for message in later:
            assert "and cannot change to offload=(" in message
            assert "lightning_zero.unshard(model)" in message


def unshard_module() -> list[bool]:
    with engine_for(nn.Linear(8, 8), compute_dtype=BF16, **AWAY) as engine:
        assert engine.module is not None
        before = engine.module.weight.detach().clone()
        engine.unshard()
        model = engine.sharder.live
    return [torch.equal(before, record.param.detach()) for record in model if record.name == "weight"]


def test_a_model_that_is_made_plain_has_its_weights_back(ranks: Ranks) -> None:
    assert ranks.run(2, unshard_module) == [[True], [True]]
