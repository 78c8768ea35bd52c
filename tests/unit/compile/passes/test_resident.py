"""Weights that stay until the optimizer steps are read where they lie, once they are there."""

import torch
from torch.fx import Graph

from lightning_zero.compile.context import PassContext
from lightning_zero.compile.passes import default_passes, run_passes
from lightning_zero.compile.passes.gather_groups import GroupLimits, use_resident
from lightning_zero.compile.passes.publish_plan import read_plan
from lightning_zero.config import CompileConfig
from tests.unit.compile.graphs import Builder, order

aten = torch.ops.aten
WEIGHT = 64 * 64 * 4  # bytes of each weight below
BF16 = torch.bfloat16


def chain(uses: str, resident: str, memory: torch.dtype = torch.float32) -> Graph:
    """x @ a @ b @ ...; there is memory for the weights named in ``resident``."""
    b = Builder()
    names = sorted(set(uses))
    shards = {name: b.shard(name, 2048) for name in names}
    memories = {name: b.input(f"memory_{name}", 64, 64, dtype=memory) for name in resident}
    x = b.input("x", 64, 64)
    for name in uses:
        whole = b.gather(shards[name], 64, 64)
        if name in memories:
            whole.args = (*whole.args, memories[name])
        x = b.call(aten.mm.default, x, whole)
    return b.done(x)


def rewritten(graph: Graph, group_bytes: int = WEIGHT, ahead: int = 1) -> str:
    graph = use_resident(graph, GroupLimits(group_bytes), ahead)
    graph.lint()
    return order(graph)


def test_each_group_is_started_while_the_one_before_is_in_use() -> None:
    assert rewritten(chain("abc", "abc")) == (
        "resident_start(memory_a, a) resident_start(memory_b, b) resident_wait(memory_a, a) mm "
        "resident_start(memory_c, c) resident_wait(memory_b, b) mm resident_wait(memory_c, c) mm"
    )


def test_groups_share_a_launch() -> None:
    assert rewritten(chain("ab", "ab"), group_bytes=2 * WEIGHT) == (
        "resident_start(memory_a, memory_b, a, b) resident_wait(memory_a, memory_b, a, b) mm mm"
    )


def test_a_weight_that_is_used_twice_is_waited_for_once_before_the_first_use() -> None:
    assert rewritten(chain("aba", "a")) == "resident_start(memory_a, a) resident_wait(memory_a, a) mm gather(b) mm mm"
    assert rewritten(chain("abab", "ab")) == (
        "resident_start(memory_a, a) resident_start(memory_b, b) resident_wait(memory_a, a) mm resident_wait(memory_b, b) mm mm mm"
    )


def test_products_read_the_memory_itself() -> None:
    graph = use_resident(chain("a", "a"), GroupLimits(WEIGHT))
    (product,) = (node for node in graph.nodes if node.target is aten.mm.default)
    assert product.args[1].name == "memory_a"


def test_others_are_gathered_as_usual() -> None:
    assert rewritten(chain("ab", "b")) == "resident_start(memory_b, b) gather(a) mm resident_wait(memory_b, b) mm"
    assert rewritten(chain("ab", "")) == "gather(a) mm gather(b) mm"


def test_memory_of_another_dtype_is_left_alone() -> None:
    assert rewritten(chain("a", "a", memory=BF16)) == "gather(a) mm"


def test_what_is_used_in_a_narrower_dtype_is_cast_where_it_is() -> None:
    b = Builder()
    shard, memory = b.shard("a", 2048), b.input("memory_a", 64, 64)
    x, y = b.input("x", 64, 64), b.input("y", 64, 64, dtype=BF16)
    wide, narrow = b.gather(shard, 64, 64), b.gather(shard, 64, 64)
    wide.args = (*wide.args, memory)
    narrow.args = (*narrow.args[:2], BF16, memory)
    narrow.meta["val"] = narrow.meta["val"].to(BF16)
    graph = b.done(b.call(aten.mm.default, x, wide), b.call(aten.mm.default, y, narrow))
    assert rewritten(graph) == "resident_start(memory_a, a) resident_wait(memory_a, a) convert_element_type mm mm"
    (cast,) = (node for node in graph.nodes if node.target is torch.ops.prims.convert_element_type.default)
    assert (cast.args[0].name, cast.args[1], cast.meta["val"].dtype) == ("memory_a", BF16, BF16)


def test_the_calls_survive_dead_code_elimination() -> None:
    graph = use_resident(chain("a", "a"), GroupLimits(WEIGHT))
    before = order(graph)
    graph.eliminate_dead_code()
    assert order(graph) == before


def test_a_cast_of_a_kept_weight_reads_memory_of_its_dtype() -> None:
    b = Builder()
    shard, memory = b.shard("a", 2048), b.input("memory_a", 64, 64, dtype=BF16)
    x, whole = b.input("x", 64, 64, dtype=BF16), b.gather(shard, 64, 64)
    whole.args = (*whole.args, memory)
    graph = b.done(b.call(aten.mm.default, x, b.call(aten._to_copy.default, whole, dtype=BF16)))
    graph = run_passes(
        graph, default_passes(PassContext(CompileConfig(unsharded_cache_mb=1, unsharded_cache_until="step"), 2))
    )
    assert order(graph) == "check_plan(a) resident_start(memory_a, a) resident_wait(memory_a, a) mm"


def test_the_plan_says_how_long_they_stay(monkeypatch: object) -> None:
    config = CompileConfig(unsharded_cache_mb=1, unsharded_cache_until="step")
    plan = read_plan(run_passes(chain("abca", "a"), default_passes(PassContext(config, 2))))
    assert [(g.weights, g.until) for g in plan.gathers if g.until == "step"] == [(("a",), "step")]
    resident = next(g for g in plan.gathers if g.until == "step")
    assert (resident.bytes, resident.used) == (WEIGHT, "mm_default")
    assert resident.started < resident.waited
    # Another graph of the same weights follows it.
    again = read_plan(run_passes(chain("bcaa", "a"), default_passes(PassContext(config, 2, agreed_plans=(plan,)))))
    assert again.digest == plan.digest
