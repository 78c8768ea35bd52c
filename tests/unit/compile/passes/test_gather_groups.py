"""Groups of gathers, and weights that stay cached until the optimizer steps."""

import torch
from torch.fx import Graph

from lightning_zero.compile.context import PassContext
from lightning_zero.compile.passes import default_passes, run_passes
from lightning_zero.compile.passes.gather_groups import GroupLimits, group_gathers, use_unsharded_cache
from lightning_zero.compile.passes.publish_plan import read_plan
from lightning_zero.config import CompileConfig
from tests.unit.compile.graphs import WEIGHT, Builder, order, products

aten = torch.ops.aten


def grouped(graph: Graph, **options: int) -> str:
    ahead = options.pop("ahead", 1)
    graph = group_gathers(graph, 2, GroupLimits(**{"group_bytes": 2 * WEIGHT} | options), ahead)
    graph.lint()
    return order(graph)


def test_consecutive_weights_share_a_launch_and_each_group_starts_while_the_one_before_is_in_use() -> None:
    assert grouped(products("abcdef")) == (
        "gather_group(a, b) gather_group(c, d) wait slice view mm slice view mm "
        "gather_group(e, f) wait slice view mm slice view mm "
        "wait slice view mm slice view mm"
    )


def test_without_looking_ahead_each_group_starts_where_it_is_used() -> None:
    assert grouped(products("abcd"), ahead=0) == (
        "gather_group(a, b) wait slice view mm slice view mm gather_group(c, d) wait slice view mm slice view mm"
    )


def test_a_weight_larger_than_a_group_is_a_group_of_its_own() -> None:
    assert grouped(products("ab"), group_bytes=WEIGHT // 2, ahead=0) == (
        "gather_group(a) wait slice view mm gather_group(b) wait slice view mm"
    )


def test_a_graph_of_little_weight_still_has_several_groups() -> None:
    assert grouped(products("abcd"), group_bytes=100 * WEIGHT, parts=4).count("gather_group") == 4


def test_small_weights_are_gathered_together_at_the_beginning() -> None:
    b = Builder()
    norm1, norm2, w, x = b.shard("n1", 32), b.shard("n2", 32), b.shard("w", 2048), b.input("x", 64, 64)
    y = b.call(aten.mul.Tensor, x, b.gather(norm1, 64))
    y = b.call(aten.mm.default, y, b.gather(w, 64, 64))
    y = b.call(aten.mul.Tensor, y, b.gather(norm2, 64))
    assert grouped(b.done(y), small_bytes=1024).startswith("gather_group(n1, n2) gather_group(w) wait slice view mul")


def test_a_group_has_one_dtype() -> None:
    result = grouped(products("abc", {"b": torch.bfloat16}), group_bytes=100 * WEIGHT, ahead=0)
    assert "gather_group(a) wait" in result
    assert "gather_group(b) wait" in result


def test_weights_that_stay_for_backward_share_no_memory_with_others() -> None:
    """All of a group lives as long as one of its weights."""
    b = Builder()
    shards = {name: b.shard(name, 2048) for name in "abcd"}
    x, weights = b.input("x", 64, 64), {}
    for name, shard in shards.items():
        weights[name] = b.gather(shard, 64, 64)
        x = b.call(aten.mm.default, x, weights[name])
    graph = b.done(x, weights["b"], b.call(aten.t.default, weights["c"]))
    result = grouped(graph, group_bytes=100 * WEIGHT, ahead=0)
    assert [word for word in result.replace(", ", ",").split() if "group" in word] == [
        "gather_group(a)",
        "gather_group(b,c)",
        "gather_group(d)",
    ]


def test_padding_lies_between_the_weights_of_a_group() -> None:
    # shards of 2080 elements: 4160 for a weight of 4096
    graph = group_gathers(products("ab", a=2080), 2, GroupLimits(100 * WEIGHT))
    slices = [node.args[1:] for node in graph.nodes if node.target is aten.slice.Tensor]
    assert slices == [(0, 0, 4096), (0, 4160, 8256)]
    (group,) = (n for n in graph.nodes if str(n.target).startswith("lightning_zero.gather_group"))
    assert group.args[2] == 4160 + 4096
    assert group.meta["val"].numel() == 8256


def test_shapes_are_known_after_the_pass() -> None:
    graph = group_gathers(products("abc"), 2, GroupLimits(2 * WEIGHT))
    for node in graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta["val"], torch.Tensor), node
        if node.target is aten.mm.default:
            assert node.args[1].meta["val"].shape == (64, 64)


WEIGHT_BYTES = 64 * 64 * 4  # bytes of each weight below
BF16 = torch.bfloat16


def chain(uses: str, cached: str, memory: torch.dtype = torch.float32) -> Graph:
    """x @ a @ b @ ...; there is memory for the weights named in ``cached``."""
    b = Builder()
    names = sorted(set(uses))
    shards = {name: b.shard(name, 2048) for name in names}
    memories = {name: b.input(f"memory_{name}", 64, 64, dtype=memory) for name in cached}
    x = b.input("x", 64, 64)
    for name in uses:
        whole = b.gather(shards[name], 64, 64)
        if name in memories:
            whole.args = (*whole.args, memories[name])
        x = b.call(aten.mm.default, x, whole)
    return b.done(x)


def rewritten(graph: Graph, group_bytes: int = WEIGHT_BYTES, ahead: int = 1) -> str:
    graph = use_unsharded_cache(graph, GroupLimits(group_bytes), ahead)
    graph.lint()
    return order(graph)


def test_each_group_is_started_while_the_one_before_is_in_use() -> None:
    assert rewritten(chain("abc", "abc")) == (
        "cached_gather_start(memory_a, a) cached_gather_start(memory_b, b) cached_gather_wait(memory_a, a) mm "
        "cached_gather_start(memory_c, c) cached_gather_wait(memory_b, b) mm cached_gather_wait(memory_c, c) mm"
    )


def test_groups_share_a_launch() -> None:
    assert rewritten(chain("ab", "ab"), group_bytes=2 * WEIGHT_BYTES) == (
        "cached_gather_start(memory_a, memory_b, a, b) cached_gather_wait(memory_a, memory_b, a, b) mm mm"
    )


def test_a_weight_that_is_used_twice_is_waited_for_once_before_the_first_use() -> None:
    assert (
        rewritten(chain("aba", "a"))
        == "cached_gather_start(memory_a, a) cached_gather_wait(memory_a, a) mm gather(b) mm mm"
    )
    assert rewritten(chain("abab", "ab")) == (
        "cached_gather_start(memory_a, a) cached_gather_start(memory_b, b) cached_gather_wait(memory_a, a) mm cached_gather_wait(memory_b, b) mm mm mm"
    )


def test_products_read_the_memory_itself() -> None:
    graph = use_unsharded_cache(chain("a", "a"), GroupLimits(WEIGHT_BYTES))
    (product,) = (node for node in graph.nodes if node.target is aten.mm.default)
    assert product.args[1].name == "memory_a"


def test_others_are_gathered_as_usual() -> None:
    assert (
        rewritten(chain("ab", "b"))
        == "cached_gather_start(memory_b, b) gather(a) mm cached_gather_wait(memory_b, b) mm"
    )
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
    assert (
        rewritten(graph)
        == "cached_gather_start(memory_a, a) cached_gather_wait(memory_a, a) convert_element_type mm mm"
    )
    (cast,) = (node for node in graph.nodes if node.target is torch.ops.prims.convert_element_type.default)
    assert (cast.args[0].name, cast.args[1], cast.meta["val"].dtype) == ("memory_a", BF16, BF16)


def test_the_calls_survive_dead_code_elimination() -> None:
    graph = use_unsharded_cache(chain("a", "a"), GroupLimits(WEIGHT_BYTES))
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
    assert order(graph) == "check_plan(a) cached_gather_start(memory_a, a) cached_gather_wait(memory_a, a) mm"


def test_the_plan_says_how_long_they_stay(monkeypatch: object) -> None:
    config = CompileConfig(unsharded_cache_mb=1, unsharded_cache_until="step")
    plan = read_plan(run_passes(chain("abca", "a"), default_passes(PassContext(config, 2))))
    assert [(g.weights, g.until) for g in plan.gathers if g.until == "step"] == [(("a",), "step")]
    cached = next(g for g in plan.gathers if g.until == "step")
    assert (cached.bytes, cached.used) == (WEIGHT_BYTES, "mm_default")
    assert cached.started < cached.waited
    # Another graph of the same weights follows it.
    again = read_plan(run_passes(chain("bcaa", "a"), default_passes(PassContext(config, 2, agreed_plans=(plan,)))))
    assert again.digest == plan.digest
