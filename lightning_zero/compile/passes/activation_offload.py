"""Offload activations to the host in forward and reload them in backward, concurrently with compute.

:func:`insert_offloads` chooses activations right after partitioning, before either graph is compiled, so that both
agree wherever they are cached. Without a limit it takes those whose copies finish before forward ends and before
backward uses them; with a limit, those unused for the longest. Small activations, inputs, weights and outputs stay.

The pass :func:`place_offloads` splits each op into start and wait. Offloads start when their value is made, and its
memory is freed at the wait. Reloads start in time for their first use, given that copies are queued. If copies are
slower than compute, a window bounds the bytes in flight.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compat.tensors import OpOverload
from lightning_zero.compile.fx_utils import (
    calls,
    first_call,
    gathers,
    ops,
    output_node,
    readers,
    reduces,
    results,
    shard_of,
    weight_nodes,
)
from lightning_zero.compile.passes.prefetch_schedule import node_seconds
from lightning_zero.compile.passes.prepare import sink
from lightning_zero.native.ops import Op, no_result, register_op
from lightning_zero.profiling.cost_model import CostModel
from lightning_zero.profiling.graph_tensors import Storage, nbytes, size_hint, storages, view_base
from lightning_zero.sharding.layout import extent


@dataclass(frozen=True)
class OffloadLimits:
    """Bounds of offloading.

    Attributes:
        least_bytes: smaller activations stay on the device.
        budget_bytes: limit for one graph; None to offload only as much as compute hides.
    """

    host: HostCosts
    least_bytes: int
    budget_bytes: float | None = None


@dataclass(frozen=True, eq=False)
class _Activation:
    """Memory that forward allocates and saves for backward.

    Attributes:
        saved: backward inputs, each with the views that make it from ``node``, in order.
        size: bytes.
        made: seconds from the beginning of forward until the value exists.
        done: seconds until its last use in forward.
        next_use: seconds from the beginning of backward until its first use.
    """

    node: Node
    saved: dict[Node, list[Node]]
    size: int
    made: float
    done: float
    next_use: float


def insert_offloads(forward: Graph, backward: Graph, outputs: int, limits: OffloadLimits, op: FindOp = ops) -> int:
    """Insert offloads and reloads into both graphs, in place, and return the offloaded bytes.

    Args:
        outputs: number of forward outputs; saved values follow them.
    """
    shards = _shards(forward, backward)
    if shards is None:
        return 0
    found, end = _activations(forward, backward, outputs, limits)
    found.sort(key=lambda activation: activation.done - activation.next_use)
    chosen = _hidden(found, end, limits.host) if limits.budget_bytes is None else _within(found, limits.budget_bytes)
    for activation in chosen:
        _move(forward, backward, activation, shards, op)
    return sum(activation.size for activation in chosen)


def _shards(forward: Graph, backward: Graph) -> tuple[Node, Node] | None:
    """Return an input of each graph by which ops find their executor; None if they share no weight."""
    mine = {shard.name: shard for shard in map(shard_of, gathers(forward))}
    for node in (*gathers(backward), *reduces(backward)):
        theirs = shard_of(node)
        if theirs.name in mine:
            return mine[theirs.name], theirs
    return None


def _activations(
    forward: Graph, backward: Graph, outputs: int, limits: OffloadLimits
) -> tuple[list[_Activation], float]:
    node_storages, clock = storages(forward), _clock(forward, limits)
    others = [*weight_nodes(forward), *(node for node in results(forward)[:outputs] if isinstance(node, Node))]
    stay = {storage for node in others for storage in node_storages[node]}
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    next_use = _clock(backward, limits)
    next_use = {node: next_use.get(node.prev, 0.0) for node in next_use}  # start of each node
    saved: dict[Storage, list[Node]] = {}
    for node in dict.fromkeys(value for value in results(forward)[outputs:] if isinstance(value, Node)):
        storage = node_storages[node][0] if isinstance(node.meta.get("val"), Tensor) else None
        if storage is not None and storage not in stay and node.name in inputs:
            saved.setdefault(storage, []).append(node)
    found = []
    for storage, nodes in saved.items():
        used = [next_use[user] for node in nodes for user in readers(inputs[node.name]) if user.op != "output"]
        copied = _copied(storage, nodes)
        if copied is None or not used or copied[2] < limits.least_bytes:
            continue
        base, chains, size = copied
        done = [clock[user] for user in readers(base) if user.op != "output"]
        found.append(_Activation(base, chains, size, clock[base], max(done, default=clock[base]), min(used)))
    return found, max(clock.values())


def _clock(graph: Graph, limits: OffloadLimits) -> dict[Node, float]:
    """Return the end of each node if nothing waits."""
    return dict(zip(graph.nodes, accumulate(node_seconds(graph, limits.host.costs)), strict=True))


def _copied(storage: Storage, saved: Sequence[Node]) -> tuple[Node, dict[Node, list[Node]], int] | None:
    """Return the node to copy, the views after it for each saved value, and its bytes.

    It is None for inputs, and for views that backward cannot make again.
    """
    chains = {node: _views(node) for node in saved}
    base = next(iter(chains.values()))[0]
    if base.op != "call_function" or any(chain[0] is not base for chain in chains.values()):
        return None
    size = _extent_bytes(base)
    plain = all(_is_constant(view) for chain in chains.values() for view in chain[1:])
    if plain and size <= storage.nbytes:
        return base, {node: chain[1:] for node, chain in chains.items()}, size
    (alone, *others), size = saved, _extent_bytes(saved[0])
    return None if others or size > storage.nbytes else (alone, {alone: []}, size)


def _views(node: Node) -> list[Node]:
    """Return the chain from the node that allocated the memory to ``node``."""
    chain = [node]
    while (source := view_base(chain[-1])) is not None:
        if chain[-1].target is operator.getitem and view_base(source) is None:
            break  # an item of several results
        chain.append(source)
    return chain[::-1]


def _is_constant(view: Node) -> bool:
    """Return True if a view depends only on its base, so that another graph can make it."""
    return len(view.all_input_nodes) == 1


def _extent_bytes(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    return extent(map(size_hint, value.shape), map(size_hint, value.stride())) * value.dtype.itemsize


def _within(found: Sequence[_Activation], budget_bytes: float) -> list[_Activation]:
    chosen = []
    for activation in found:
        if activation.size <= budget_bytes:
            chosen.append(activation)
            budget_bytes -= activation.size
    return chosen


def _hidden(found: Sequence[_Activation], end: float, host: HostCosts) -> list[_Activation]:
    """Return activations whose queued copies finish in time."""
    chosen: list[_Activation] = []
    for activation in found:
        if _offloads_in_time([*chosen, activation], end, host) and _reloads_in_time([*chosen, activation], host):
            chosen.append(activation)
    return chosen


def _offloads_in_time(chosen: Sequence[_Activation], end: float, host: HostCosts) -> bool:
    free = 0.0
    for activation in sorted(chosen, key=lambda activation: activation.made):
        free = max(free, activation.made) + host.seconds(activation.size)
    return free <= end


def _reloads_in_time(chosen: Sequence[_Activation], host: HostCosts) -> bool:
    free = 0.0
    for activation in sorted(chosen, key=lambda activation: activation.next_use):
        free += host.seconds(activation.size)
        if free > activation.next_use:
            return False
    return True


def _move(forward: Graph, backward: Graph, activation: _Activation, shards: tuple[Node, Node], op: FindOp) -> None:
    node, value = activation.node, activation.node.meta["val"]
    last = node
    while last.next.target is operator.getitem:  # other items of the same op's results
        last = last.next
    with forward.inserting_after(last):
        host = forward.call_function(op(OFFLOAD), (node, shards[0]))
    host.meta["val"] = value.new_empty_strided(value.size(), value.stride(), device="cpu")
    output = output_node(forward)
    output.args = (tuple(host if result in activation.saved else result for result in results(forward)),)
    inputs = {given.name: given for given in backward.find_nodes(op="placeholder")}
    given = [inputs[saved.name] for saved in activation.saved]
    first = next(user for user in backward.nodes if any(one in user.all_input_nodes for one in given))
    with backward.inserting_before(first):
        back = backward.call_function(op(RELOAD), (given[0], shards[1]))
        back.meta["val"] = value
        copies = {node: back}
        for saved, own in zip(activation.saved, given, strict=True):
            own.meta = {"val": host.meta["val"]}
            for view in activation.saved[saved]:
                if view not in copies:
                    copies[view] = backward.node_copy(view, copies.__getitem__)
            own.replace_all_uses_with(copies[saved], delete_user_cb=lambda user: user is not back)


def _on_host(value: Tensor, shard: Tensor) -> Tensor:
    return value.new_empty_strided(value.size(), value.stride(), device="cpu")


def _on_device(host: Tensor, shard: Tensor) -> Tensor:
    return host.new_empty_strided(host.size(), host.stride(), device=shard.device)


def _same_value(value: Tensor, host: Tensor, shard: Tensor) -> Tensor:
    return value


OFFLOAD, RELOAD = "offload", "reload"
register_op(Op(OFFLOAD, shards=1, fake=_on_host))
register_op(Op("offload_start", shards=1, fake=_on_host))
register_op(Op("offload_wait", shards=2, fake=no_result, has_effect=True))
register_op(Op(RELOAD, shards=1, fake=_on_device))
register_op(Op("reload_start", shards=1, fake=_on_device))
register_op(Op("reload_wait", shards=2, fake=_same_value, has_effect=True))

LAUNCH_S = 1e-5  # seconds per copy, in addition to its size


@dataclass(frozen=True)
class HostCosts:
    """Costs of copies between device and host.

    Attributes:
        costs: seconds of nodes, and bandwidth of the host.
        window_bytes: bound on bytes in flight if compute waits for copies.
    """

    costs: CostModel
    window_bytes: float = float("inf")

    def seconds(self, size: int) -> float:
        return size / self.costs.host_bytes_per_s + LAUNCH_S


FindOp = Callable[[str], OpOverload]  # returns one of our ops by name


def place_offloads(graph: Graph, host: HostCosts, op: FindOp = ops) -> Graph:
    """Split ``offload`` and ``reload`` into starts and waits, in place."""
    offloads = [node for node in graph.nodes if calls(node, OFFLOAD)]
    reloads = [node for node in graph.nodes if calls(node, RELOAD)]
    if offloads:
        _place_waits(graph, offloads, host, op)
    if reloads:
        sink(graph, reloads)
        _place_starts(graph, reloads, host, op)
    return graph


@dataclass(eq=False)
class _Copy:
    node: Node
    size: int
    over: float  # estimated end
    last: int  # position of the value's last use


def _place_waits(graph: Graph, offloads: list[Node], host: HostCosts, op: FindOp) -> None:
    seconds, nodes = node_seconds(graph, host.costs), list(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    waiting: list[_Copy] = []
    now = free = 0.0  # time of the current node, and time at which the copy stream is free

    def wait(copy: _Copy, before: Node) -> None:
        waiting.remove(copy)
        with graph.inserting_before(before):
            value, shard = copy.node.args
            graph.call_function(op("offload_wait"), (value, copy.node, shard)).meta["val"] = None

    starts = set(offloads)
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


def _place_starts(graph: Graph, reloads: list[Node], host: HostCosts, op: FindOp) -> None:
    seconds, nodes = node_seconds(graph, host.costs), list(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    used = {node: min(_uses(node, position), default=position[node]) for node in reloads}
    reloads = sorted(reloads, key=used.__getitem__)
    sizes = [nbytes(node.meta["val"]) for node in reloads]
    starts = _starts(position[first_call(graph)], [used[node] for node in reloads], sizes, host, seconds)
    for node, start in zip(reloads, starts, strict=True):
        source, shard = node.args
        first = min(node.users, key=position.__getitem__)
        with graph.inserting_before(nodes[start]):
            begun = graph.call_function(op("reload_start"), (source, shard))
        with graph.inserting_before(first):
            wait = graph.call_function(op("reload_wait"), (begun, source, shard))
        begun.meta, wait.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(wait)
    for node in reloads:  # erased last: others may have been inserted before them
        graph.erase_node(node)


def _starts(begin: int, used: list[int], sizes: list[int], host: HostCosts, seconds: list[float]) -> list[int]:
    """Return the positions before which reloads start, computed from the last to the first."""
    clock = [0.0, *accumulate(seconds)]  # start of each node if nothing waits
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
    """Return the position at which a copy fits into the window with those before it.

    If there is none, return the use of the copy before it.
    """
    node_storages, first = sizes[number], number
    while first and node_storages + sizes[first - 1] <= window_bytes:
        first -= 1
        node_storages += sizes[first]
    return used[first - 1] if first else 0


def _uses(value: Node, position: dict[Node, int]) -> list[int]:
    return [position[user] for user in readers(value) if user in position and user.op != "output"]
