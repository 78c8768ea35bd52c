"""Costs of a graph's nodes."""

import time

import pytest
import torch
from torch.fx import Graph, Node
from torch.nn import functional as F

from lightning_zero.profiling.node_costs import DeviceSpeed, FlopCache, NodeCost, fusion_groups, graph_costs, node_flops
from tests.helpers.tracing import traced
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten
# A launch costs nothing and a second moves one byte: seconds are bytes.
BYTES = DeviceSpeed({torch.float32: 1e9}, 1.0, 0.0)


def costs(graph: Graph, speed: DeviceSpeed = BYTES) -> dict[str, NodeCost]:
    found = graph_costs(graph, speed)
    assert [cost.name for cost in found] == [node.name for node in graph.nodes]
    return {cost.name: cost for cost in found}


def test_a_product_counts_two_operations_per_multiplication() -> None:
    cost = costs(traced(torch.mm, torch.zeros(2, 3), torch.zeros(3, 5)))["mm"]
    assert cost == NodeCost("mm", flops=60, read=4 * (6 + 15), written=40, seconds=124.0)


def test_an_op_that_another_one_runs_counts_as_itself() -> None:
    """With the state of a generator: in front of it, or by name."""

    def again(*args: object, rng_state: object = None) -> None: ...

    b = Builder()
    x, y, state = b.input("x", 2, 3), b.input("y", 3, 5), b.graph.placeholder("state")
    for args, kwargs in [((aten.mm.default, x, y), {"rng_state": state}), ((state, aten.mm.default, x, y), {})]:
        node = b.graph.call_function(again, args, kwargs)
        node.meta["val"] = torch.empty(2, 5, device="meta")
        assert node_flops(node) == 60


def test_what_is_found_once_for_equal_ops_is_what_each_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = F.conv2d(x @ y, x[:, :, :2, :2].transpose(0, 1), padding=1)[:, :, :4, :4]
        return (x @ y) @ y[:, :3]

    asked: list[Node] = []

    def counted(node: Node) -> int:
        asked.append(node)
        return node_flops(node)

    graph = traced(work, torch.zeros(2, 2, 4, 4), torch.zeros(4, 4))
    monkeypatch.setattr("lightning_zero.profiling.node_costs.node_flops", counted)
    flops = FlopCache()
    assert [flops.of(node) for node in graph.nodes] == [node_flops(node) for node in graph.nodes]
    assert 0 < len(asked) < sum(node_flops(node) > 0 for node in graph.nodes)


def test_the_slower_of_computing_and_moving_counts_and_the_launch_on_top() -> None:
    graph = traced(torch.mm, torch.zeros(2, 3), torch.zeros(3, 5))
    assert costs(graph, DeviceSpeed({torch.float32: 10.0}, 62.0, 0.5))["mm"].seconds == 6.5
    assert costs(graph, DeviceSpeed({torch.float32: 60.0}, 62.0, 0.5))["mm"].seconds == 2.5


def test_each_dtype_has_its_own_peak_and_an_unmeasured_one_the_lowest() -> None:
    speed = DeviceSpeed({torch.float32: 60.0, torch.bfloat16: 120.0}, 1e9, 0.0)
    for dtype, seconds in ((torch.float32, 1.0), (torch.bfloat16, 0.5), (torch.float64, 1.0)):
        a, b = torch.zeros(2, 3, dtype=dtype), torch.zeros(3, 5, dtype=dtype)
        assert costs(traced(torch.mm, a, b), speed)["mm"].seconds == pytest.approx(seconds)


def test_symbolic_sizes_count_as_seen_and_add_no_guard() -> None:
    graph = traced(torch.mm, torch.zeros(2, 3), torch.zeros(3, 5), mode="symbolic")
    [mm] = graph.find_nodes(op="call_function", target=aten.mm.default)
    environment = mm.meta["val"].shape[0].node.shape_env
    guards = len(environment.guards)
    assert costs(graph)[mm.name].flops == 60
    assert len(environment.guards) == guards


def test_views_inputs_and_the_output_cost_nothing() -> None:
    found = costs(traced(lambda x: x.t().reshape(2, 2, 3), torch.zeros(3, 4)), DeviceSpeed({}, 1.0, 9.0))
    assert len(found) > 3
    assert all(cost == NodeCost(cost.name) for cost in found.values())


def test_a_fused_run_reads_what_enters_once_and_writes_what_leaves_once() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        a = x * 2
        b = x + 1
        return (a * b).t().exp()

    found = costs(traced(run, torch.zeros(3, 4)))
    assert sum(cost.read for cost in found.values()) == 48
    assert sum(cost.written for cost in found.values()) == 48
    assert (found["mul"].read, found["exp"].written) == (48, 48)


def test_a_fused_run_is_launched_once() -> None:
    speed = DeviceSpeed({torch.float32: 1.0}, 1e18, 1.0)
    found = costs(traced(lambda x: (x * 2).softmax(0).sum() + 1, torch.zeros(8)), speed)
    # softmax is one op of its own, between two runs
    assert sum(cost.seconds for cost in found.values()) == pytest.approx(3.0)


def test_what_two_runs_share_is_written_once_and_read_again() -> None:
    def two(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = x.exp()
        return (a @ w) + a

    found = costs(traced(two, torch.zeros(4, 4), torch.zeros(4, 4)))
    assert (found["exp"].read, found["exp"].written) == (64, 64)
    assert (found["mm"].read, found["mm"].written) == (128, 64)
    assert (found["add"].read, found["add"].written) == (128, 64)


def test_reading_at_places_of_its_own_does_not_end_a_fused_run() -> None:
    b = Builder()
    x, places = b.input("x", 64, 64), b.input("places", 64, 1, dtype=torch.int64)
    chosen = b.call(aten.gather.default, b.call(aten.exp.default, x), 1, places)
    graph = b.done(b.call(aten.neg.default, chosen))
    assert {*fusion_groups(graph).values()} == {0}
    assert len(fusion_groups(graph)) == 3


def test_parts_of_one_tensor_are_read_each_but_never_more_than_all_of_it() -> None:
    graph = traced(lambda x: (x[:2] + x[2:]) * x.sum(0), torch.zeros(4, 4))
    assert sum(cost.read for cost in costs(graph).values()) == 64


def test_a_constant_is_made_where_it_is_used() -> None:
    found = costs(traced(lambda x: x + torch.full((3, 4), 2.0), torch.zeros(3, 4)))
    assert sum(cost.read + cost.written for cost in found.values()) == 96


def test_attention_is_counted_also_where_torch_has_no_formula_for_the_cpus_op() -> None:
    q = torch.zeros(1, 2, 8, 16)
    found = costs(traced(lambda q: F.scaled_dot_product_attention(q, q, q), q))
    [flops] = [cost.flops for cost in found.values() if cost.flops]
    assert flops == 2 * (2 * 2 * 8 * 8 * 16)


def test_the_formula_of_a_backward_convolution_is_found() -> None:
    x, w = torch.zeros(1, 2, 4, 4), torch.zeros(3, 2, 1, 1)
    assert costs(traced(F.conv2d, x, w))["convolution"].flops == 2 * 16 * 2 * 3


def test_transfers_cost_a_launch_and_a_handed_over_gradient_a_copy() -> None:
    b = Builder()
    shard = b.shard("w", 8)
    weight = b.gather(shard, 4, 4)
    grad = b.call(aten.mm.default, weight, weight)
    one = b.graph.call_function(torch.ops.lightning_zero.reduce_add.default, (grad, shard)).name
    two = b.graph.call_function(torch.ops.lightning_zero.reduce_group.default, ([grad, grad], [shard, shard])).name
    found = costs(b.done(weight), DeviceSpeed({torch.float32: 1e9}, 1.0, 0.25))
    assert found[weight.name] == NodeCost(weight.name, seconds=0.25)
    assert found[one] == NodeCost(one, read=64, written=64, seconds=128.25)
    assert found[two] == NodeCost(two, read=128, written=128, seconds=256.25)


def test_a_transfer_does_not_end_a_fused_run() -> None:
    b = Builder()
    shard, x = b.shard("w", 8), b.input("x", 4, 4)
    y = b.call(aten.exp.default, x)
    weight = b.gather(shard, 4, 4)
    z = b.call(aten.add.Tensor, y, weight)
    found = costs(b.done(z))
    assert (found[y.name].read, found[y.name].written) == (64, 0)
    assert (found[z.name].read, found[z.name].written) == (64, 64)


def test_an_op_whose_formula_fails_has_no_operations() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    mm = graph.call_function(aten.mm.default, (x, x))
    x.meta["val"] = mm.meta["val"] = torch.empty(2, 3, device="meta")
    assert costs(graph)[mm.name].flops == 0


def test_nodes_without_values_cost_nothing_but_a_launch() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    mm = graph.call_function(aten.mm.default, (x, x))
    assert costs(graph, DeviceSpeed({}, 1.0, 0.5))[mm.name] == NodeCost(mm.name, seconds=0.5)


def test_the_probe_is_quick_and_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    begun = time.process_time()
    speed = DeviceSpeed.of(torch.device("cpu"))
    assert time.process_time() - begun < 5, "well under a second"
    assert torch.equal(state, torch.get_rng_state())
    assert min(speed.flops_per_s.values()) > 1e6
    assert speed.bytes_per_s > 1e7
    assert 0 < speed.launch_s < 1e-2


def test_fp8_products_are_faster_than_those_of_bfloat16() -> None:
    speed = DeviceSpeed({torch.bfloat16: 10.0, torch.float32: 1.0}, 1.0, 0.0)
    assert 10.0 < speed.flops(torch.float8_e4m3fn) == speed.flops(torch.float8_e5m2) < 20.0
