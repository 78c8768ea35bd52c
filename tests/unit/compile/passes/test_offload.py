"""When activations leave for the host, when their memory is let go of, and when they come back."""

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.passes.activation_offload import HostCosts, place_offloads
from lightning_zero.profiling.node_costs import DeviceSpeed
from lightning_zero.profiling.cost_model import NOMINAL_COSTS, CostModel
from tests.unit.compile.graphs import WEIGHT, Builder, order

aten = torch.ops.aten
offload, reload = "offload", "reload"


def costs(copy: float, window: float = float("inf")) -> HostCosts:
    """Seconds for a copy of 64 x 64, where a product takes one, and nothing else takes any."""
    speed = DeviceSpeed({torch.float32: 2 * 64**3}, 1e18, 1e-18)
    return HostCosts(CostModel(NOMINAL_COSTS.gathers, speed, host_bytes_per_s=WEIGHT / copy), window * WEIGHT)


class Passes(Builder):
    def __init__(self, backward: bool = False) -> None:
        super().__init__()
        self.s = self.shard("s")
        self.x = self.input("tangents_1" if backward else "x", 64, 64)
        self.host = {name: self.input(name, 64, 64) for name in ("a", "b", "c")} if backward else {}

    def products(self, count: int, read: Node | None = None) -> Node:
        """The last of some, one after the other."""
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
    """A CUDA graph must hold the whole copy, and the backward may come at once."""
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
