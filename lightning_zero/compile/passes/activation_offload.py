"""Chooses the activations that leave for the host between forward and backward, and puts it into both graphs.

Runs where a joint graph has been partitioned: what crosses from forward to backward is known, and neither graph has
been compiled, so both say the same from then on, whichever of them comes out of a cache. An activation that leaves
crosses as a tensor of the host.

Those leave first that are not needed for longest, as far as a budget reaches; without one, as many as travel beside
compute, out before forward ends and back before they are used, so that nobody waits for them. What is left alone: what
is small; inputs, weights in any form, and what the user is given, whose memory would stay anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compile.graph import gathers, ops, output_node, readers, reduces, results, shard_of, weight_nodes
from lightning_zero.compile.passes.offload import OFFLOAD, RELOAD, FindOp, HostCosts
from lightning_zero.compile.passes.prefetch_schedule import node_seconds
from lightning_zero.profiling.tensors import Storage, size_hint, storages, view_base
from lightning_zero.sharding.layout import extent

__all__ = ["OffloadLimits", "insert_offloads"]


@dataclass(frozen=True)
class OffloadLimits:
    """What leaves.

    Attributes:
        host: how long that takes.
        least_bytes: smaller activations stay.
        budget_bytes: for all of one graph together; None: what nobody waits for.
    """

    host: HostCosts
    least_bytes: int
    budget_bytes: float | None = None


@dataclass(frozen=True, eq=False)
class _Activation:
    """Memory that forward makes, and saves for backward.

    Attributes:
        node: what is copied.
        saved: what backward is given, with the views that make each of ``node``, in order.
        size: bytes.
        made: seconds from forward's beginning until it is there.
        done: until forward has used it for the last time.
        again: from backward's beginning until its first use there.
    """

    node: Node
    saved: dict[Node, list[Node]]
    size: int
    made: float
    done: float
    again: float


def insert_offloads(forward: Graph, backward: Graph, outputs: int, limits: OffloadLimits, op: FindOp = ops) -> int:
    """Changes both graphs, in place.

    Args:
        outputs: of forward, which the user, or autograd, gets; behind them is what is saved.
        op: gives an op of ours by its name.

    Returns:
        Bytes that leave.
    """
    shards = _shards(forward, backward)
    if shards is None:
        return 0
    found, end = _activations(forward, backward, outputs, limits)
    found.sort(key=lambda activation: activation.done - activation.again)
    chosen = _hidden(found, end, limits.host) if limits.budget_bytes is None else _within(found, limits.budget_bytes)
    for activation in chosen:
        _move(forward, backward, activation, shards, op)
    return sum(activation.size for activation in chosen)


def _shards(forward: Graph, backward: Graph) -> tuple[Node, Node] | None:
    """An input of both graphs by which ops find their executor; None where they have none."""
    mine = {shard.name: shard for shard in map(shard_of, gathers(forward))}
    for node in (*gathers(backward), *reduces(backward)):
        theirs = shard_of(node)
        if theirs.name in mine:
            return mine[theirs.name], theirs
    return None


def _activations(
    forward: Graph, backward: Graph, outputs: int, limits: OffloadLimits
) -> tuple[list[_Activation], float]:
    """Those that may leave; how long forward takes."""
    held, clock = storages(forward), _clock(forward, limits)
    others = [*weight_nodes(forward), *(node for node in results(forward)[:outputs] if isinstance(node, Node))]
    stay = {storage for node in others for storage in held[node]}
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    again = _clock(backward, limits)
    again = {node: again.get(node.prev, 0.0) for node in again}  # when it begins
    saved: dict[Storage, list[Node]] = {}
    for node in dict.fromkeys(value for value in results(forward)[outputs:] if isinstance(value, Node)):
        storage = held[node][0] if isinstance(node.meta.get("val"), Tensor) else None
        if storage is not None and storage not in stay and node.name in inputs:
            saved.setdefault(storage, []).append(node)
    found = []
    for storage, nodes in saved.items():
        used = [again[user] for node in nodes for user in readers(inputs[node.name]) if user.op != "output"]
        copied = _copied(storage, nodes)
        if copied is None or not used or copied[2] < limits.least_bytes:
            continue
        base, chains, size = copied
        done = [clock[user] for user in readers(base) if user.op != "output"]
        found.append(_Activation(base, chains, size, clock[base], max(done, default=clock[base]), min(used)))
    return found, max(clock.values())


def _clock(graph: Graph, limits: OffloadLimits) -> dict[Node, float]:
    """When each node is over, if nothing waits."""
    return dict(zip(graph.nodes, accumulate(node_seconds(graph, limits.host.costs)), strict=True))


def _copied(storage: Storage, saved: Sequence[Node]) -> tuple[Node, dict[Node, list[Node]], int] | None:
    """What to copy of memory that a forward makes; the views behind it, for each thing that is saved; its bytes. None
    for inputs, and where views cannot be made again."""
    chains = {node: _views(node) for node in saved}
    base = next(iter(chains.values()))[0]
    if base.op != "call_function" or any(chain[0] is not base for chain in chains.values()):
        return None
    size = _reach(base)
    plain = all(_is_constant(view) for chain in chains.values() for view in chain[1:])
    if plain and size <= storage.nbytes:
        return base, {node: chain[1:] for node, chain in chains.items()}, size
    (alone, *others), size = saved, _reach(saved[0])
    return None if others or size > storage.nbytes else (alone, {alone: []}, size)


def _views(node: Node) -> list[Node]:
    """From what made the memory to ``node``, which is a view of it, or itself."""
    chain = [node]
    while (source := view_base(chain[-1])) is not None:
        if chain[-1].target is operator.getitem and view_base(source) is None:
            break  # one of several results
        chain.append(source)
    return chain[::-1]


def _is_constant(view: Node) -> bool:
    """Whether it can be made in another graph: it reads nothing but what it is a view of."""
    return len(view.all_input_nodes) == 1


def _reach(node: Node) -> int:
    """Bytes from a tensor's first element to its last."""
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
    """Those whose copies are over in time, queueing one behind the other."""
    chosen: list[_Activation] = []
    for activation in found:
        if _leave_in_time([*chosen, activation], end, host) and _come_in_time([*chosen, activation], host):
            chosen.append(activation)
    return chosen


def _leave_in_time(chosen: Sequence[_Activation], end: float, host: HostCosts) -> bool:
    free = 0.0
    for activation in sorted(chosen, key=lambda activation: activation.made):
        free = max(free, activation.made) + host.seconds(activation.size)
    return free <= end


def _come_in_time(chosen: Sequence[_Activation], host: HostCosts) -> bool:
    free = 0.0
    for activation in sorted(chosen, key=lambda activation: activation.again):
        free += host.seconds(activation.size)
        if free > activation.again:
            return False
    return True


def _move(forward: Graph, backward: Graph, activation: _Activation, shards: tuple[Node, Node], op: FindOp) -> None:
    node, value = activation.node, activation.node.meta["val"]
    behind = node
    while behind.next.target is operator.getitem:  # other results of the same op
        behind = behind.next
    with forward.inserting_after(behind):
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
