import torch
from torch.fx import Graph

from lightning_zero.compile.passes.gather_groups import GroupLimits, group_gathers
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
    """All of a group lives as long as one of its weights does."""
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
