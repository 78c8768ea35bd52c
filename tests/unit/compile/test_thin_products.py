"""Products of thin weights that read one activation become one, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.graphs import AC_GRAPH_ID, RECOMPUTE
from lightning_zero.compile.thin_products import MAX_COLUMNS, merge_thin_products
from tests.unit.compile.graphs import Builder, aten

TOKENS, WIDTH, OUTPUTS = 12, 64, 20
MM = aten.mm.default
WIDE = torch.float64
Change = Callable[[Builder, dict[str, list[Node]]], list[Node]]


def adapters(
    rows: tuple[int, ...] = (8, 16, 8), change: Change | None = None, train: bool = True, length: Any = TOKENS // 3
) -> Graph:
    """Return a joint graph of ``sum_i x @ a_i.T @ b_i.T``.

    Args:
        rows: of each ``a_i``.
        change: adds nodes, given those named below, and returns further results.
        length: of each of three sequences.
    """
    b, nodes = Builder(), {name: [] for name in ("a", "h", "dh", "da", "terms", "sums")}
    tokens = 3 * length
    x = b.input("primals_x", 3, length, WIDTH, dtype=WIDE)
    shards = [(b.shard(f"a{i}", n * WIDTH, WIDE), b.shard(f"b{i}", OUTPUTS * n, WIDE)) for i, n in enumerate(rows)]
    dy = b.input("tangents_1", tokens, OUTPUTS, dtype=WIDE)
    ys, weights, reduced = [], [], []
    for (a_shard, b_shard), n in zip(shards, rows, strict=True):
        a, up = b.gather(a_shard, n, WIDTH), b.gather(b_shard, OUTPUTS, n)
        flat = b.call(aten.view.default, x, [tokens, WIDTH])
        h = b.call(MM, flat, b.call(aten.t.default, a))
        rest = b.call(aten.view.default, b.call(aten._unsafe_view.default, h, [3, length, n]), [tokens, n])
        ys.append(b.call(MM, rest, b.call(aten.t.default, up)))
        nodes["a"].append(a)
        nodes["h"].append(h)
        weights.append((a, up, flat, rest))
    y = ys[0]
    for other in ys[1:]:
        y = b.call(aten.add.Tensor, y, other)
    if not train:
        return b.done(y)
    dx = b.call(aten.mul.Tensor, x, 2.0)
    for (a_shard, b_shard), (a, up, flat, rest) in reversed(list(zip(shards, weights, strict=True))):
        dh = b.call(MM, dy, up)
        reduced.append(b.reduce(b.call(MM, b.call(aten.t.default, dy), rest), b_shard))
        da = b.call(MM, b.call(aten.t.default, dh), flat)
        reduced.append(b.reduce(da, a_shard))
        term = b.call(MM, dh, a)
        dx = b.call(aten.add.Tensor, dx, b.call(aten.view.default, term, [3, length, WIDTH]))
        for name, node in (("dh", dh), ("da", da), ("terms", term), ("sums", dx)):
            nodes[name].append(node)
    more = change(b, nodes) if change else []
    return b.done(y, dx, *reduced, *more)


class Run(Interpreter):
    """Compute a graph's results, and compare each value with what the graph says of it."""

    def run_node(self, node: Node) -> Any:
        if node.target is torch.ops.lightning_zero.gather.default:
            value = self.env[node.args[0]].view(node.args[1])
        elif node.target is torch.ops.lightning_zero.reduce.default:
            value = self.env[node.args[0]].clone()
        else:
            value = super().run_node(node)
        noted = node.meta.get("val")
        if isinstance(value, Tensor) and node.target is not torch.ops.lightning_zero.reduce.default:
            assert (value.shape, value.stride(), value.dtype) == (noted.shape, noted.stride(), noted.dtype), node
        return value


def results(graph: Graph) -> list[Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(node.meta["val"].shape, dtype=WIDE) for node in graph.find_nodes(op="placeholder")]
    return Run(GraphModule({}, graph)).run(*inputs)


def merged(make: Callable[[], Graph]) -> tuple[int, int]:
    """Return how many products a graph has, before and after the merge, which changes no result."""
    graph = make()
    before, expected = len(graph.find_nodes(op="call_function", target=MM)), results(graph)
    merge_thin_products(graph)
    graph.lint()
    torch.testing.assert_close(results(graph), expected)
    return before, len(graph.find_nodes(op="call_function", target=MM))


def test_each_kind_of_product_becomes_one() -> None:
    # Nine of the 18 products differ in both operands: ``h @ b.T`` and the gradients of ``b`` and ``h``. Nine become three.
    assert merged(adapters) == (18, 9 + 3)
    assert merged(lambda: adapters(train=False)) == (6, 3 + 1)


def test_products_of_a_symbolic_number_of_tokens_become_one() -> None:
    sizes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    length = sizes.from_tensor(torch.empty(4), symbolic_context=dynamic).shape[0]
    with sizes:
        graph = merge_thin_products(adapters(length=length))
    graph.lint()
    assert len(graph.find_nodes(op="call_function", target=MM)) == 9 + 3
    assert not sizes.shape_env.guards


def test_further_adapters_become_a_second_product() -> None:
    rows = (MAX_COLUMNS // 4,) * 4  # 64 columns of 64 are not thin, but 16 are
    assert merged(lambda: adapters(rows)) == (24, 12 + 3)
    assert merged(lambda: adapters((16,) * 9)) == (54, 27 + 3 * 2)


@pytest.mark.parametrize("rows", [(8,), (24, 40), (8, 12), (8, 32)])
def test_one_adapter_and_wide_or_unaligned_ones_stay(rows: tuple[int, ...]) -> None:
    before, after = merged(lambda: adapters(rows))
    assert before == after


def test_results_that_other_ops_read_stay() -> None:
    """Their strides would change."""
    before, after = merged(lambda: adapters(change=lambda b, nodes: [b.call(aten.relu.default, nodes["h"][0])]))
    assert after == before - 3, "the other two are merged"


@pytest.mark.parametrize("view", [(aten.view.default, [3, -1]), (aten.as_strided.default, [12, 8], [8, 1])])
def test_results_stay_whose_rows_views_need_as_neighbours(view: tuple[Any, ...]) -> None:
    def change(b: Builder, nodes: dict[str, list[Node]]) -> list[Node]:
        target, *args = view
        seen = b.call(target, nodes["h"][0], *args)
        return [b.call(MM, seen, b.call(aten.t.default, seen))]

    before, after = merged(lambda: adapters(change=change))
    assert after == before - 3, "the other two are merged"


def test_a_weight_of_two_groups_moves_to_the_first_of_both() -> None:
    def two_groups() -> Graph:
        b = Builder()
        xs = [b.input(f"primals_{name}", TOKENS, WIDTH, dtype=WIDE) for name in "xz"]
        *own, shared = [b.shard(f"a{i}", 8 * WIDTH, WIDE) for i in range(3)]
        hs = [b.call(MM, x, b.call(aten.t.default, b.gather(a, 8, WIDTH))) for x, a in zip(xs, own, strict=True)]
        both = b.call(aten.t.default, b.gather(shared, 8, WIDTH))
        hs += [b.call(MM, x, both) for x in xs]
        return b.done(*(b.call(MM, h, b.call(aten.t.default, h)) for h in hs))

    assert merged(two_groups) == (8, 4 + 2)


def test_a_gradient_that_is_read_for_more_than_a_reduction_stays() -> None:
    before, after = merged(lambda: adapters(change=lambda b, nodes: [b.call(aten.relu.default, nodes["da"][0])]))
    assert after == before - 4


@pytest.mark.parametrize("read", ["terms", "sums"])
def test_a_sum_that_is_read_between_its_terms_stays(read: str) -> None:
    before, after = merged(lambda: adapters(change=lambda b, nodes: [b.call(aten.relu.default, nodes[read][1])]))
    assert after == before - 4


def test_a_sum_that_is_doubled_between_its_terms_stays() -> None:
    def double(b: Builder, nodes: dict[str, list[Node]]) -> list[Node]:
        first, second = nodes["sums"][:2]
        with b.graph.inserting_after(first):
            twice = b.call(aten.add.Tensor, first, first)
        second.replace_input_with(first, twice)
        return []

    before, after = merged(lambda: adapters(change=double))
    assert after == before - 4


def test_regions_of_a_checkpoint_stay_apart() -> None:
    def regions(b: Builder, nodes: dict[str, list[Node]]) -> list[Node]:
        for number, node in enumerate(nodes["h"]):
            node.meta |= {AC_GRAPH_ID: number // 2, RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE}
        return []

    graph = merge_thin_products(adapters(change=regions))
    kept = [node for node in graph.find_nodes(op="call_function", target=MM) if AC_GRAPH_ID in node.meta]
    assert [(node.meta[AC_GRAPH_ID], node.meta["val"].shape[1]) for node in kept] == [(0, 24), (1, 8)]


def test_a_merged_weight_is_recomputed_like_its_parts() -> None:
    def tags(b: Builder, nodes: dict[str, list[Node]]) -> list[Node]:
        for node in nodes["a"]:
            node.meta |= {AC_GRAPH_ID: 5, RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE}
        return []

    [weight, *_] = merge_thin_products(adapters(change=tags)).find_nodes(op="call_function", target=aten.cat.default)
    assert weight.meta[AC_GRAPH_ID] == 5
    assert weight.meta[RECOMPUTE] is CheckpointPolicy.MUST_RECOMPUTE
