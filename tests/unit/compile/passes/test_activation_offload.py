"""Test which activations are offloaded, when copies start and end, and when memory is released."""

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compile.fx_utils import results
from lightning_zero.compile.passes.activation_offload import HostCosts, OffloadLimits, insert_offloads, place_offloads
from lightning_zero.profiling.cost_model import NOMINAL_COSTS, CostModel
from lightning_zero.profiling.node_costs import DeviceSpeed
from tests.unit.compile.graphs import WEIGHT, Builder, order

aten = torch.ops.aten


ALL = float("inf")


def limits(budget: float | None = ALL, copy: float = 1.0, least: float = 1.0) -> OffloadLimits:
    """Sizes in tensors of 64 x 64, of which a product takes a second."""
    speed = DeviceSpeed({torch.float32: 2 * 64**3}, 1e18, 1e-18)
    host = HostCosts(CostModel(NOMINAL_COSTS.gathers, speed, host_bytes_per_s=WEIGHT / copy))
    return OffloadLimits(host, int(least * WEIGHT), None if budget is None else budget * WEIGHT)


class Pair:
    """A forward and a backward that reads saved values, the last first."""

    def __init__(self) -> None:
        self.forward, self.backward = Builder(), Builder()
        self.shards = self.forward.shard("primals_1"), self.backward.shard("primals_1")
        self.x = self.forward.input("primals_2", 64, 64)
        self.saved: list[Node] = []

    def product(self) -> Node:
        self.x = self.forward.call(aten.mm.default, self.x, self.x)
        return self.x

    def save(self, *nodes: Node) -> None:
        self.saved += nodes

    def done(self, *given: Node, read: Any = aten.mm.default, lead: int = 0) -> tuple[Graph, Graph, int]:
        """Partition and return both graphs; ``given`` are the user's outputs."""
        self.forward.gather(self.shards[0], 64, 64)
        forward = self.forward.done(*given, *self.saved)
        for node in self.saved:
            placeholder = self.backward.input(node.name, 1)
            placeholder.meta["val"] = node.meta["val"]
        grad = self.backward.input("tangents_1", 64, 64)
        inputs = self.backward.graph.find_nodes(op="placeholder")[1:-1]
        for _ in range(lead):
            grad = self.backward.call(aten.mm.default, grad, grad)
        for node in reversed(inputs):
            flat = self.backward.call(aten.reshape.default, node, [-1])
            whole = self.backward.call(aten.expand.default, self.backward.call(aten.sum.default, flat), [64, 64])
            grad = self.backward.call(read, grad, whole)
        return forward, self.backward.done(grad, self.backward.reduce(grad, self.shards[1])), len(given)


def left(pair: tuple[Graph, Graph, int], chosen: OffloadLimits | None = None) -> list[str]:
    """Return names of offloaded activations."""
    forward, backward, outputs = pair
    nbytes = insert_offloads(forward, backward, outputs, chosen or limits())
    forward.lint()
    backward.lint()
    ours = [node for node in forward.nodes if "offload" in str(node.target)]
    assert nbytes >= 0
    assert len(ours) == sum("reload" in str(node.target) for node in backward.nodes)
    return [node.args[0].name for node in ours]


def test_what_is_large_and_saved_leaves_and_nothing_else() -> None:
    p = Pair()
    weight = p.forward.gather(p.shards[0], 64, 64)
    cast = p.forward.call(aten._to_copy.default, weight, dtype=torch.float64)
    small = p.forward.call(aten.slice.Tensor, p.product(), 0, 0, 8)
    small = p.forward.call(aten.clone.default, small)
    large, given, seen = p.product(), p.product(), p.product()
    view = p.forward.call(aten.t.default, seen)
    p.save(p.shards[0], p.forward.graph.find_nodes(op="placeholder")[1], weight, cast, small, large, given, view)
    assert left(p.done(given, seen)) == [large.name]


def test_both_graphs_know_it_as_a_tensor_of_the_host() -> None:
    p = Pair()
    value = p.forward.call(aten.t.default, p.product())
    p.save(value)
    forward, backward, outputs = p.done(p.product())
    insert_offloads(forward, backward, outputs, limits())
    host = results(forward)[1]
    [placeholder] = [node for node in backward.find_nodes(op="placeholder") if node.name == value.name]
    for node in (host, placeholder):
        assert node.meta["val"].device.type == "cpu"
    assert order(forward) == "mm offload(primals_1) t mm gather(primals_1)", "what the view is of"
    [back] = [node for node in backward.nodes if "reload" in str(node.target)]
    assert back.meta["val"].device.type == "meta"
    assert {str(user.target) for user in back.users} == {"aten.t.default"}, "the view is made again"


def test_those_leave_first_that_are_not_needed_for_longest_and_what_does_not_fit_is_passed_over() -> None:
    p = Pair()
    values = [p.product() for _ in range(4)]
    p.save(*values)
    assert left(p.done(p.product()), limits(2)) == [value.name for value in values[:2]]
    p = Pair()
    values = [p.product() for _ in range(2)]
    wide = p.forward.call(aten.cat.default, [p.product(), p.x])
    values += [wide, p.product(), p.product()]
    p.save(*values)
    assert left(p.done(p.product()), limits(3)) == [value.name for value in (*values[:2], values[3])]


@pytest.mark.parametrize(("budget", "count"), [(0, 0), (0.9, 0), (1, 1), (3.5, 3), (ALL, 4)])
def test_a_budget_is_kept(budget: float, count: int) -> None:
    p = Pair()
    p.save(*(p.product() for _ in range(4)))
    assert len(left(p.done(p.product()), limits(budget))) == count


@pytest.mark.parametrize(("copy", "count"), [(0.1, 4), (0.9, 4), (1.5, 2), (2.5, 1), (4.5, 0)])
def test_without_a_budget_what_leaves_is_hidden_on_its_way_out(copy: float, count: int) -> None:
    """Values exist after 1, 2, 3 and 4 of 5 seconds."""
    p = Pair()
    values = [p.product() for _ in range(4)]
    p.save(*values)
    assert left(p.done(p.product(), lead=20), limits(None, copy)) == [value.name for value in values[:count]]


@pytest.mark.parametrize(("lead", "count"), [(3, 4), (2, 3), (1, 2), (0, 2)])
def test_and_on_its_way_back(lead: int, count: int) -> None:
    """The last value is needed after ``lead`` seconds of backward, and each of those before it a second later."""
    p = Pair()
    values = [p.product() for _ in range(4)]
    p.save(*values)
    for _ in range(20):
        p.product()
    assert left(p.done(p.product(), lead=lead), limits(None, 1.4)) == [value.name for value in values[:count]]


def split(p: Pair) -> list[Node]:
    """Three views of one product."""
    wide = p.forward.call(aten.cat.default, [p.product(), p.x, p.x], 1)
    parts = p.forward.call(aten.split.Tensor, wide, 64, 1)
    values = []
    for number in range(3):
        part = p.forward.graph.call_function(operator.getitem, (parts, number))
        part.meta["val"] = parts.meta["val"][number]
        values.append(p.forward.call(aten.view.default, part, [64, 4, 16]))
    return values


def test_views_of_one_memory_leave_once_and_are_made_again() -> None:
    p = Pair()
    p.save(*split(p))
    forward, backward, outputs = p.done(p.product())
    nbytes = insert_offloads(forward, backward, outputs, limits())
    assert nbytes == 3 * WEIGHT
    ours = torch.ops.lightning_zero
    assert len(forward.find_nodes(op="call_function", target=ours.offload.default)) == 1
    assert len(backward.find_nodes(op="call_function", target=ours.reload.default)) == 1
    assert len(backward.find_nodes(op="call_function", target=aten.split.Tensor)) == 1, "made once"
    hosts = results(forward)[1:]
    assert len(hosts) == 3
    assert len(set(hosts)) == 1


def run(graph: Graph, *inputs: torch.Tensor) -> Any:
    return GraphModule({}, graph)(*inputs)


def test_both_graphs_compute_what_they_did() -> None:
    """With fakes of our ops on a CPU, where the host is the device."""

    def plain(graph: Graph) -> Graph:
        for node in list(graph.nodes):
            name = str(node.target)
            if name.startswith("lightning_zero"):
                with graph.inserting_before(node):
                    op, args = (aten.clone.default, node.args[:1])
                    if "gather" in name or "reduce" in name:
                        op, args = aten.detach.default, node.args[:1]
                    new = graph.call_function(op, args)
                node.replace_all_uses_with(new)
                graph.erase_node(node)
        return graph

    found = []
    for chosen in (limits(0), limits()):
        p = Pair()
        p.save(*split(p), p.product())
        forward, backward, outputs = p.done(p.product())
        insert_offloads(forward, backward, outputs, chosen)
        torch.manual_seed(0)
        shard, x = torch.randn(1, 32), torch.randn(64, 64) / 8
        given, *saved = run(plain(forward), shard, x)
        found.append((given, run(plain(backward), shard, *saved, torch.randn(64, 64))))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_graph_without_weights_keeps_all() -> None:
    forward, backward = Builder(), Builder()
    x = forward.input("primals_1", 64, 64)
    value = forward.call(aten.mm.default, x, x)
    forward_graph = forward.done(forward.call(aten.mm.default, value, value), value)
    given, grad = backward.input(value.name, 64, 64), backward.input("tangents_1", 64, 64)
    backward_graph = backward.done(backward.call(aten.mm.default, given, grad))
    assert left((forward_graph, backward_graph, 1)) == []


offload, reload = "offload", "reload"


def costs(copy: float, window: float = float("inf")) -> HostCosts:
    """Seconds for a copy of 64 x 64; a product takes one second, and other nodes none."""
    speed = DeviceSpeed({torch.float32: 2 * 64**3}, 1e18, 1e-18)
    return HostCosts(CostModel(NOMINAL_COSTS.gathers, speed, host_bytes_per_s=WEIGHT / copy), window * WEIGHT)


class Passes(Builder):
    def __init__(self, backward: bool = False) -> None:
        super().__init__()
        self.s = self.shard("s")
        self.x = self.input("tangents_1" if backward else "x", 64, 64)
        self.host = {name: self.input(name, 64, 64) for name in ("a", "b", "c")} if backward else {}

    def products(self, count: int, read: Node | None = None) -> Node:
        """Return the last of several products in a row."""
        for _ in range(count):
            self.x = self.call(aten.mm.default, self.x, self.x if read is None else read)
        return self.x

    def leaves(self, value: Node) -> Node:
        return self._ours(offload, value)

    def comes(self, name: str) -> Node:
        return self._ours(reload, self.host[name])

    def _ours(self, name: str, value: Node) -> Node:
        node = self.graph.call_function(getattr(torch.ops.lightning_zero, name).default, (value, self.s))
        node.meta["val"] = value.meta["val"]
        return node


def placed(graph: Graph, host: HostCosts) -> str:
    graph = place_offloads(graph, host)
    graph.lint()
    assert len(list(graph.nodes)) == len(list(reversed(graph.nodes))) == len(graph.nodes), "one is in there, and erased"
    words = order(graph).replace("offload_start(s)", "out").replace("offload_wait(s)", "gone")
    for name in ("a", "b", "c"):
        words = words.replace(f"reload_start(s, {name})", f"in({name})").replace(
            f"reload_start({name}, s)", f"in({name})"
        )
        words = words.replace(f"reload_wait({name}, s)", f"here({name})").replace(
            f"reload_wait(s, {name})", f"here({name})"
        )
    return words


def test_memory_is_let_go_of_when_the_copy_should_be_over() -> None:
    b = Passes()
    host = b.leaves(b.products(1))
    graph = b.done(b.products(4), host)
    assert placed(graph, costs(1.5)) == "mm out mm mm gone mm mm"


def test_and_not_before_its_last_use_which_may_be_a_views() -> None:
    b = Passes()
    value = b.products(1)
    host = b.leaves(value)
    b.products(2)
    graph = b.done(b.products(1, b.call(aten.t.default, value)), b.products(1), host)
    assert placed(graph, costs(0.5)) == "mm out mm mm t mm gone mm"


def test_what_is_not_over_by_then_is_waited_for_at_the_end() -> None:
    """A CUDA graph must contain the whole copy, and backward may start at once."""
    b = Passes()
    graph = b.done(*(b.leaves(b.products(1)) for _ in range(2)))
    assert placed(graph, costs(5.0)) == "mm out mm out gone gone"


def test_copies_queue_one_behind_the_other() -> None:
    b = Passes()
    hosts = [b.leaves(b.products(1)) for _ in range(2)]
    graph = b.done(b.products(5), *hosts)
    # The first from 1 to 2.4, the second from there to 3.8.
    assert placed(graph, costs(1.4)) == "mm out mm out mm gone mm gone mm mm mm"


def test_where_copies_cannot_keep_up_compute_waits_for_the_oldest() -> None:
    b = Passes()
    hosts = [b.leaves(b.products(1)) for _ in range(4)]
    graph = b.done(b.products(1), *hosts)
    assert placed(graph, costs(5.0, window=2)) == "mm out mm out mm gone out mm gone out mm gone gone"


def test_a_wait_reads_the_value_so_that_its_memory_lasts_till_then() -> None:
    b = Passes()
    value = b.products(1)
    graph = place_offloads(b.done(b.products(3), b.leaves(value)), costs(1.5))
    [wait] = [node for node in graph.nodes if "offload_wait" in str(node.target)]
    [start] = [node for node in graph.nodes if "offload_start" in str(node.target)]
    assert wait.args == (value, start, start.args[1])
    assert wait.is_impure()


def test_a_copy_back_starts_as_late_as_compute_hides_it() -> None:
    b = Passes(backward=True)
    b.products(4)
    graph = b.done(b.products(1, b.comes("a")))
    assert placed(graph, costs(1.5)) == "mm mm in(a) mm mm here(a) mm"


def test_copies_back_queue_too_and_keep_the_order_of_their_uses() -> None:
    b = Passes(backward=True)
    b.products(4)
    b.products(1, b.comes("a"))
    graph = b.done(b.products(1, b.comes("b")))
    assert placed(graph, costs(1.5)) == "mm in(a) mm mm in(b) mm here(a) mm here(b) mm"


def test_what_is_not_hidden_starts_where_there_is_room_for_it() -> None:
    b = Passes(backward=True)
    for name in "abc":
        b.products(1, b.comes(name))
    graph = b.done(b.x)
    assert placed(graph, costs(5.0, window=2)) == "in(a) in(b) here(a) in(c) mm here(b) mm here(c) mm"


def test_a_view_that_backward_makes_long_before_it_is_read_does_not_wait_for_its_copy() -> None:
    b = Passes(backward=True)
    view = b.call(aten.t.default, b.comes("a"))
    b.products(4)
    graph = b.done(b.products(1, view))
    assert placed(graph, costs(0.5)) == "mm mm mm in(a) mm here(a) t mm"


def test_a_copy_back_may_start_where_another_is_needed() -> None:
    b = Passes(backward=True)
    b.products(2)
    here = [b.comes("a"), b.comes("b")]
    b.products(1, here[0])
    graph = b.done(b.products(1, here[1]))
    assert placed(graph, costs(0.9)) == "mm in(a) mm here(a) in(b) mm here(b) mm"


def test_a_graph_from_which_nothing_leaves_is_left_alone() -> None:
    b = Passes()
    graph = b.done(b.products(3))
    assert placed(graph, costs(1.0)) == "mm mm mm"
