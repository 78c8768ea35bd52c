"""Activations leave for the host in forward and come back in backward, both beside compute.

The partition has ops ``offload`` and ``reload`` (``activation_offload.py``), each of which does all at once. This
pass takes them apart. A copy out starts where its value is made. The value's memory is needed up to a wait, which is
placed after the value's last use, where the copy should be complete. A copy back starts so long before its first use
that it is over by then, counting that copies queue one behind the other; activations that arrive early only take up
memory.

Where copies cannot keep up with compute, compute has to wait for them: at most so many bytes are on their way at once,
or the memory that is to be spared would be taken by what has not left yet, or has come back too early.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compat.ops import OpOverload
from lightning_zero.compile.graph import calls, first_call, ops, readers
from lightning_zero.compile.passes.prefetch_schedule import node_seconds
from lightning_zero.compile.passes.sink import sink
from lightning_zero.native.ops import Op, no_result, register_op
from lightning_zero.profiling.cost_model import CostModel
from lightning_zero.profiling.graph_tensors import nbytes

__all__ = ["OFFLOAD", "RELOAD", "FindOp", "HostCosts", "place_offloads"]


def _on_host(value: Tensor, shard: Tensor) -> Tensor:
    return value.new_empty_strided(value.size(), value.stride(), device="cpu")


def _on_device(host: Tensor, shard: Tensor) -> Tensor:
    return host.new_empty_strided(host.size(), host.stride(), device=shard.device)


def _itself(value: Tensor, host: Tensor, shard: Tensor) -> Tensor:
    return value


OFFLOAD, RELOAD = "offload", "reload"
register_op(Op(OFFLOAD, shards=1, fake=_on_host))
register_op(Op("offload_start", shards=1, fake=_on_host))
register_op(Op("offload_wait", shards=2, fake=no_result, has_effect=True))
register_op(Op(RELOAD, shards=1, fake=_on_device))
register_op(Op("reload_start", shards=1, fake=_on_device))
register_op(Op("reload_wait", shards=2, fake=_itself, has_effect=True))

LAUNCH_S = 1e-5  # of a copy, whatever its size


@dataclass(frozen=True)
class HostCosts:
    """What decides when activations travel.

    Attributes:
        costs: seconds of a graph's nodes, and the bandwidth of the host.
        window_bytes: at most so many are on their way where compute waits for copies.
    """

    costs: CostModel
    window_bytes: float = float("inf")

    def seconds(self, size: int) -> float:
        """Of one copy."""
        return size / self.costs.host_bytes_per_s + LAUNCH_S


FindOp = Callable[[str], OpOverload]  # an op of ours by its name


def place_offloads(graph: Graph, host: HostCosts, op: FindOp = ops) -> Graph:
    """Takes ``offload`` and ``reload`` apart into starts and waits, in place."""
    leaving = [node for node in graph.nodes if calls(node, OFFLOAD)]
    coming = [node for node in graph.nodes if calls(node, RELOAD)]
    if leaving:
        _place_waits(graph, leaving, host, op)
    if coming:
        sink(graph, coming)
        _place_starts(graph, coming, host, op)
    return graph


@dataclass(eq=False)
class _Copy:
    node: Node
    size: int
    over: float  # when it should be
    last: int  # position of its value's last use


def _place_waits(graph: Graph, leaving: list[Node], host: HostCosts, op: FindOp) -> None:
    seconds, nodes = node_seconds(graph, host.costs), list(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    waiting: list[_Copy] = []
    now = free = 0.0  # the moment, and when the lane of copies has nothing to do any more

    def wait(copy: _Copy, before: Node) -> None:
        waiting.remove(copy)
        with graph.inserting_before(before):
            value, shard = copy.node.args
            graph.call_function(op("offload_wait"), (value, copy.node, shard)).meta["val"] = None

    starts = set(leaving)
    for number, node in enumerate(nodes):
        for copy in [c for c in waiting if node.op == "output" or (c.over <= now and c.last < number)]:
            wait(copy, node)
        if node in starts:
            value = node.args[0]
            assert isinstance(value, Node)
            size = nbytes(value.meta["val"])
            while sum(c.size for c in waiting) + size > host.window_bytes:
                oldest = next((c for c in waiting if c.last < number), None)
                if oldest is None:
                    break
                now = max(now, oldest.over)
                wait(oldest, node)
            free = max(free, now) + host.seconds(size)
            with graph.inserting_before(node):
                start = graph.call_function(op("offload_start"), node.args)
            start.meta = dict(node.meta)
            waiting.append(_Copy(start, size, free, max(_uses(value, position), default=number)))
            node.replace_all_uses_with(start)
            graph.erase_node(node)
        now += seconds[number]


def _place_starts(graph: Graph, coming: list[Node], host: HostCosts, op: FindOp) -> None:
    seconds, nodes = node_seconds(graph, host.costs), list(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    used = {node: min(_uses(node, position), default=position[node]) for node in coming}
    coming = sorted(coming, key=used.__getitem__)
    sizes = [nbytes(node.meta["val"]) for node in coming]
    starts = _starts(position[first_call(graph)], [used[node] for node in coming], sizes, host, seconds)
    for node, start in zip(coming, starts, strict=True):
        source, shard = node.args
        first = min(node.users, key=position.__getitem__)
        with graph.inserting_before(nodes[start]):
            begun = graph.call_function(op("reload_start"), (source, shard))
        with graph.inserting_before(first):
            wait = graph.call_function(op("reload_wait"), (begun, source, shard))
        begun.meta, wait.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(wait)
    for node in coming:  # which others may have been put before
        graph.erase_node(node)


def _starts(begin: int, used: list[int], sizes: list[int], host: HostCosts, seconds: list[float]) -> list[int]:
    """The positions before which copies start; found from the last to the first."""
    clock = [0.0, *accumulate(seconds)]  # when each node begins, if nothing waits
    starts, due = list(used), float("inf")
    for number in reversed(range(len(used))):
        launch = min(due, clock[used[number]]) - host.seconds(sizes[number])
        if launch >= clock[begin]:
            starts[number] = max(begin, min(bisect_right(clock, launch) - 1, used[number]))
        else:
            starts[number] = max(begin, _earliest(number, used, sizes, host.window_bytes))
        due = launch
    return list(accumulate(reversed(starts), min))[::-1]  # in order


def _earliest(number: int, used: list[int], sizes: list[int], window_bytes: float) -> int:
    """Where there is room for a copy beside those before it; where there never is, as the one before it is used."""
    held, first = sizes[number], number
    while first and held + sizes[first - 1] <= window_bytes:
        first -= 1
        held += sizes[first]
    return used[first - 1] if first else 0


def _uses(value: Node, position: dict[Node, int]) -> list[int]:
    """Positions of what reads a value, through views, within the graph."""
    return [position[user] for user in readers(value) if user in position and user.op != "output"]
