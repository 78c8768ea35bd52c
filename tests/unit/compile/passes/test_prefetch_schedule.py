"""When groups start: as late as compute hides the transfer, otherwise as early as memory allows."""

import pytest
import torch
from torch.fx import Graph

from lightning_zero.compile.context import PassContext
from lightning_zero.compile.passes import default_passes, run_passes
from lightning_zero.compile.passes.gather_groups import GroupLimits, group_gathers
from lightning_zero.compile.passes.publish_plan import read_plan
from lightning_zero.config import CompileConfig
from lightning_zero.profiling.cost_model import BESIDE_COMPUTE, NOMINAL_COSTS, CostModel
from lightning_zero.profiling.node_costs import DeviceSpeed
from tests.unit.compile.graphs import WEIGHT, Builder, order, products

aten = torch.ops.aten
FLOPS = 2 * 64**3  # of each product below


def costs(transfer: float, product: float = 1.0) -> CostModel:
    """Seconds for a weight during compute, and for a product; other nodes take no time."""
    speed = DeviceSpeed({torch.float32: FLOPS / product}, 1e18, 1e-18)
    return CostModel(((1, transfer * BESIDE_COMPUTE / WEIGHT),), speed)


def placed(graph: Graph, transfer: float, **options: float) -> str:
    """Views are left out; the waits stay."""
    graph = group_gathers(graph, 2, GroupLimits(WEIGHT), costs=costs(transfer), **options)  # type: ignore[arg-type]
    graph.lint()
    return order(graph).replace("slice view ", "").replace("gather_group", "gather")


AHEAD = "gather(a) gather(b) wait mm gather(c) wait mm gather(d) wait mm wait mm"


def test_a_transfer_that_one_product_hides_starts_right_before_that_product() -> None:
    assert placed(products("abcd"), 0.5) == "gather(a) wait gather(b) mm wait gather(c) mm wait gather(d) mm wait mm"


def test_without_estimates_and_where_nothing_is_hidden_groups_start_one_group_ahead() -> None:
    assert placed(products("abcd"), 2.5) == AHEAD
    plain = group_gathers(products("abcd"), 2, GroupLimits(WEIGHT))
    assert order(plain).replace("slice view ", "").replace("gather_group", "gather") == AHEAD


def test_with_more_room_transfers_that_are_not_hidden_start_earlier() -> None:
    assert placed(products("abcd"), 2.5, window_bytes=3 * WEIGHT) == (
        "gather(a) gather(b) gather(c) wait mm gather(d) wait mm wait mm wait mm"
    )
    assert placed(products("abcd"), 3.5, window_bytes=4 * WEIGHT).startswith("gather(a) gather(b) gather(c) gather(d) ")


def test_less_room_than_one_group_ahead_takes_is_no_reason_to_wait() -> None:
    assert placed(products("abcd"), 2.5, window_bytes=1) == AHEAD


def test_transfers_queue_one_behind_the_other() -> None:
    """d's takes from 1.5 to 3, c's from 0 to 1.5; b's and a's are not hidden."""
    assert placed(products("abcd"), 1.5, window_bytes=4 * WEIGHT) == (
        "gather(a) gather(b) gather(c) wait mm wait gather(d) mm wait mm wait mm"
    )


def test_a_group_that_several_products_must_hide_starts_several_early() -> None:
    b = Builder()
    shard, x = b.shard("w", 2048), b.input("x", 64, 64)
    for _ in range(6):
        x = b.call(aten.mm.default, x, x)
    graph = b.done(b.call(aten.mm.default, x, b.gather(shard, 64, 64)))
    assert placed(graph, 2.5, ahead=0) == "mm mm mm gather(w) mm mm mm wait mm"


def test_what_is_needed_first_comes_alone_and_the_groups_after_it_grow() -> None:
    graph = group_gathers(products("abcdefghijkl"), 2, GroupLimits(4 * WEIGHT, first=(0.0, 1 / 4, 1 / 2)))
    groups = [gather.weights for gather in read_plan(graph).gathers]
    assert groups == [("a",), ("b",), ("c", "d"), ("e", "f", "g", "h"), ("i", "j", "k", "l")]


def wide(rows: int) -> Graph:
    b = Builder()
    shards = {name: b.shard(name, 2048) for name in "abcdefgh"}
    x = b.input("x", rows, 64)
    for shard in shards.values():
        x = b.call(aten.mm.default, x, b.gather(shard, 64, 64))
    return b.done(x)


def test_batches_of_other_shapes_change_places_and_nothing_that_ranks_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.compile.context.SMALL_BYTES", 0)
    config = CompileConfig(gather_group_mb=2 * WEIGHT / 2**20)
    plans = [
        read_plan(run_passes(wide(rows), default_passes(PassContext(config, 2, costs(2.0))))) for rows in (8, 8192)
    ]
    assert plans[0].digest == plans[1].digest
    assert [g.started for g in plans[0].gathers] != [g.started for g in plans[1].gathers]
    for plan in plans:
        starts = [g.started for g in plan.gathers]
        assert starts == sorted(starts)


def test_beside_weights_that_stay_until_the_step_places_follow_the_order_of_use_alone() -> None:
    """Launches of both kinds interleave, and their order must be the same on every rank."""

    def mixed(rows: int) -> Graph:
        b = Builder()
        shards = {name: b.shard(name, 2**15) for name in "abcd"}
        memory, x = b.input("kept_b", 256, 256), b.input("x", rows, 256)
        for name, shard in shards.items():
            whole = b.gather(shard, 256, 256)
            if name == "b":
                whole.args = (*whole.args, memory)
            x = b.call(aten.mm.default, x, whole)
        return b.done(x)

    config = CompileConfig(unsharded_cache_mb=1, unsharded_cache_until="step")
    few, many = (
        order(run_passes(mixed(rows), default_passes(PassContext(config, 2, NOMINAL_COSTS)))) for rows in (2, 2**20)
    )
    assert few == many
    assert few.startswith("check_plan(a) gather_group(a) ")
