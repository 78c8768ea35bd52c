"""The passes change the time and dtype of transfers of weights, and no bit of the results."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from lightning_zero.profiling.cost_model import NOMINAL_COSTS, CostModel
from lightning_zero.profiling.node_costs import DeviceSpeed
from tests.helpers.models import Case, OneLayer, OneMLP, TiedLayer, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative, assert_same_bits
from tests.helpers.sharded import engine_for, sgd, train_case, train_sharded
from tests.ranks.pool import Ranks

BF16 = torch.bfloat16
STEPS = 4

OFF: dict[str, Any] = {"prefetch": False}
ON: dict[str, Any] = {"gather_group_mb": 0.02, "reduce_group_mb": 0.02}
PERSISTENT: dict[str, Any] = ON | {"unsharded_cache_mb": float("inf")}
# All weights at once; and each as late as a device that computes slowly lets it.
EARLY: dict[str, Any] = ON | {"prefetch_mb": 64}
LATE: dict[str, Any] = ON | {"costs": CostModel(NOMINAL_COSTS.gathers, DeviceSpeed({torch.float32: 1e9}, 1e9, 1e-5))}
WAYS = (OFF, ON, PERSISTENT, EARLY, LATE)
# Weights gathered by collectives; and copied out of peers' memory, as CPUs do by themselves.
COLLECTED: dict[str, Any] = ON | {"gather_transport": "collective"}
COPIED: dict[str, Any] = ON | {"gather_transport": "copy"}
CACHED: dict[str, Any] = COPIED | {"unsharded_cache_mb": float("inf"), "unsharded_cache_until": "step"}


def all_ways(
    case: str | type[Case], mixed: bool, ways: Sequence[dict[str, Any]] = WAYS
) -> list[tuple[Reference, dict[str, int]]]:
    options: dict[str, Any] = {"compute_dtype": BF16, "reduce_dtype": BF16} if mixed else {}
    context = partial(torch.autocast, "cpu", BF16, cache_enabled=False)
    results = []
    for chosen in ways:
        torch._dynamo.reset()
        more = {"context": context} if mixed else {}
        engine_options = options | chosen
        results.append(train_case(case, "aot_eager", STEPS, engine_options=engine_options, **more))
    return results


def all_equal(results: Sequence[tuple[Reference, dict[str, int]]]) -> None:
    (off, _), *others = results
    for on, counters in others:
        assert_same_bits(on, off)
        assert counters["gather_groups"] > 0


@pytest.mark.parametrize(
    ("case", "mixed"),
    [
        pytest.param("LoRA", False, marks=pytest.mark.slow),
        ("NeverUsed", False),
        pytest.param("OddMLP", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.exhaustive_variants("OddMLP-True", "LoRA-False")
def test_losses_gradients_and_parameters_are_bitwise_equal(ranks: Ranks, case: str, mixed: bool) -> None:
    for results in ranks.run(2, all_ways, case, mixed, WAYS if case == "NeverUsed" else WAYS[:3], deadline=240):
        all_equal(results)


def copies_are_equal(results: Sequence[tuple[Reference, dict[str, int]]]) -> None:
    """Train with weights that are gathered by collectives, copied, and copied and cached."""
    (on, gathered), *others = results
    assert gathered.get("copied_weights", 0) == 0
    assert others[0][1]["prefetched_groups"] > 0  # on their way before the graph began
    for copied, counters in others:
        assert counters["copied_weights"] > 0
        assert_same_bits(copied, on)


@pytest.fixture(scope="module")
def tied(ranks: Ranks) -> list[list[tuple[Reference, dict[str, int]]]]:
    """Trainings of a model with a tied weight in mixed precision, by rank; without prefetch, with it, with weights that
    stay, collected, and copied and cached.
    """
    return ranks.run(2, all_ways, TiedLayer, True, (OFF, ON, PERSISTENT, COLLECTED, CACHED), deadline=240)


def test_mixed_precision_and_a_tied_weight_change_no_bit_either(tied: Any) -> None:
    for results in tied:
        all_equal(results[:3])


@pytest.mark.exhaustive  # the test above places weights in two ways
def test_nor_do_they_where_weights_come_early_or_late(ranks: Ranks) -> None:
    for results in ranks.run(2, all_ways, TiedLayer, True, (OFF, EARLY, LATE), deadline=240):
        all_equal(results)


def test_copies_from_peers_bring_the_same_bits(tied: Any) -> None:
    for _, on, _, collected, cached in tied:
        copies_are_equal([collected, on, cached])


@pytest.mark.exhaustive  # see test_peers.py
def test_copies_from_two_peers_bring_the_same_bits(ranks: Ranks) -> None:
    for results in ranks.run(3, all_ways, TiedLayer, True, (COLLECTED, COPIED), deadline=240):
        copies_are_equal(results)


def test_weights_used_in_low_precision_travel_in_it(tied: Any) -> None:
    """Count bytes on the wire: half of float32 for the weight of every linear layer but the head, which is tied to the
    embedding.
    """
    (_, off), (_, on), (_, cached) = tied[0][:3]
    # All gather in float32 in their first, eager step; later small weights are kept for backward, or all are.
    assert off["gathers"] > on["gathers"] > cached["gathers"]
    blocks = TiedLayer().blocks
    weights = sum(module.weight.numel() for module in blocks.modules() if isinstance(module, torch.nn.Linear))
    # Two bytes an element, in forward and in backward of each compiled step.
    assert off["gather_bytes"] - on["gather_bytes"] >= (STEPS - 1) * 2 * 2 * weights
    # Kept weights are not gathered in backward at all. (Those of the first layer norm, say, are small anyway, and the
    # head's is kept without a budget.)
    assert on["gather_bytes"] - cached["gather_bytes"] >= (STEPS - 1) * 2 * weights
    # All compute copies are written at once, not one by one; only the first, eager step takes edits of weights into account.
    assert on.get("compute_shard_writes", 0) == off.get("compute_shard_writes", 0)


def mean_of_parts(case: type[Case], mixed: bool) -> list[tuple[Reference, dict[str, int]]]:
    """Gradients reduce-scattered; sent one-sidedly into peers' memory; and weights copied out of it, too."""
    one_sided = ON | {"reduce_transport": "copy"}
    return all_ways(
        case, mixed, (ON, one_sided, one_sided | {"gather_transport": "copy"}) if mixed else (ON, one_sided)
    )


@pytest.mark.parametrize(("world_size", "mixed"), [(2, True), pytest.param(3, False, marks=pytest.mark.slow)])
@pytest.mark.exhaustive_variants("3-False")
def test_gradients_pushed_to_peers_are_the_same(ranks: Ranks, world_size: int, mixed: bool) -> None:
    for (on, _), *others in ranks.run(world_size, mean_of_parts, OneLayer, mixed, deadline=240):
        for one_sided, _ in others:
            tolerance = 1e-2 if mixed else 1e-6
            assert_close_relative(one_sided.losses, on.losses, tolerance, what="losses")
            assert_close_relative(one_sided.grads[0], on.grads[0], tolerance, atol=1e-6, what="gradients")
            assert_close_relative(one_sided.params, on.params, tolerance, atol=1e-5, what="parameters")


def starts(options: dict[str, Any]) -> list[list[int]]:
    """Return the positions at which each graph starts its gathers."""
    torch._dynamo.reset()
    model = build(OneMLP)
    with engine_for(model, "aot_eager", **options) as engine:
        train_sharded(engine, model, make_batches(OneMLP, 2, 12), sgd(model))
        return [[gather.started for gather in graph.gathers] for graph in engine.session.plans.plan.graphs]


@pytest.mark.exhaustive
def test_places_do_differ(ranks: Ranks) -> None:
    """The tests above compare something."""
    usual, early, late = (ranks.run(1, starts, options)[0] for options in (ON, EARLY, LATE))
    assert sum(early[0]) < sum(usual[0]) < sum(late[0])
    assert len(usual[0]) > 4


@pytest.mark.parametrize("gather_transport", [pytest.param("collective", marks=pytest.mark.slow), "copy"])
@pytest.mark.exhaustive_variants("collective")
def test_a_compute_shard_follows_its_master(ranks: Ranks, gather_transport: str) -> None:
    """In-place changes that leave no trace in version counters, between steps, are seen by the next step."""
    for before, after, expected in ranks.run(2, change_masters_behind_the_back, gather_transport, deadline=120):
        assert before != after
        assert after == expected


def change_masters_behind_the_back(gather_transport: str) -> tuple[float, float, float]:
    torch.manual_seed(0)
    model = build(OneLayer)
    (batch,) = make_batches(OneLayer, 1, 4)
    context = partial(torch.autocast, "cpu", BF16, cache_enabled=False)
    losses = []
    with engine_for(
        model, "aot_eager", compute_dtype=BF16, reduce_dtype=BF16, gather_transport=gather_transport
    ) as engine:
        for step in range(3):
            if step == 2:
                for param in model.parameters():
                    param.data.mul_(0.5)
            with engine.train_step(), context():
                loss = model.loss(batch)
            loss.backward()
            losses.append(loss.item())
        engine.eval_step()
        for param in model.parameters():
            param.data.mul_(2.0)
        engine.eval_step()
        with torch.no_grad(), context():
            back = model.loss(batch).item()
        assert back == losses[1], "an exchanged weight must be seen in evaluation, too"
    plain = build(OneLayer)
    with torch.no_grad(), context():
        for param in plain.parameters():
            param.mul_(0.5)
        expected = plain.loss(batch).item()
    return losses[1], losses[2], expected
