"""Pass gradients to the executor's reduce buckets instead of returning them to autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_zero.compat.grouped_products import grouped_mm
from lightning_zero.compile.fx_utils import (
    TRANSPOSES,
    cast_dtype,
    is_view_or_cast,
    nodes_in_role,
    ops,
    output_node,
    reduces,
    repeat_views,
    users_of_forms,
    weight_name,
    weight_views,
)
from lightning_zero.compile.passes.gather_groups import split_into_groups
from lightning_zero.compile.scaled_mm_op import SCALED_MM
from lightning_zero.native.ops import Op, Role, no_result, reduce_op, register_op
from lightning_zero.profiling.graph_tensors import nbytes

register_op(reduce_op("reduce_group", Role.REDUCE))
register_op(reduce_op("reduce_zero_copy", Role.REDUCE))
register_op(reduce_op("reduce_after_reads", Role.REDUCE))
register_op(reduce_op("reduce_release"))
register_op(Op("end_reads", shards=1, fake=no_result, has_effect=True))


def enqueue_gradients(graph: Graph) -> Graph:
    """Enqueue gradients of reduces instead of returning them, in place.

    ``g = reduce(grad, s); return (..., g)`` becomes ``reduce_add(grad, s); return (..., None)``.

    A widening cast of the gradient is removed, since the executor casts while it copies. Gradients of a tied weight may
    be summed before they are returned (``g = a + b`` of two reduces): both are enqueued and the sum is dropped.
    """
    enqueued = reduces(graph)
    if not enqueued:
        return graph
    ours, made = set(enqueued), list(enqueued)
    for node in made:  # the list grows
        for user in node.users:
            if user.op == "call_function" and user not in ours and ours.issuperset(user.all_input_nodes):
                ours.add(user)
                made.append(user)
    output = output_node(graph)
    returned = output.args[0]
    assert isinstance(returned, tuple | list)
    output.args = (tuple(None if value in ours else value for value in returned),)
    for node in sorted(made[len(enqueued) :], reverse=True):
        if not node.users:
            graph.erase_node(node)
    for node in enqueued:
        _skip_widening(node)
        assert not node.users, (
            f"the gradient {node} is used by {list(node.users)}; a pass must see every use of a reduce"
        )
        with graph.inserting_before(node):
            void = graph.call_function(ops("reduce_add"), node.args[:2])
        void.meta.update({key: value for key, value in node.meta.items() if key != "val"})
        void.meta["val"] = None
        graph.erase_node(node)
    return graph


def group_reduces(graph: Graph, group_bytes: int, parts: int) -> Graph:
    """Enqueue several gradients at once, in place, to save launches by the host.

    Args:
        group_bytes: bound on bytes of gradients that wait for the last of their group.
        parts: minimum number of groups, for graphs with few gradients.
    """
    nodes = graph.find_nodes(op="call_function", target=ops("reduce_add"))
    limit = min(group_bytes, sum(map(_bytes, nodes)) // parts)
    for group in split_into_groups(nodes, limit, _bytes):
        if len(group) == 1:
            continue
        with graph.inserting_before(group[-1]):
            grouped = graph.call_function(
                ops("reduce_group"), ([node.args[0] for node in group], [node.args[1] for node in group])
            )
        grouped.meta["val"] = None
        grouped.meta["weights"] = tuple(weight_name(node) for node in group)
        for node in group:
            graph.erase_node(node)
    return graph


def reduce_after_reads(graph: Graph) -> Graph:
    """Enqueue gradients after the graph has read the executor's copies of their weights, in place.

    A gradient may use the memory of its weight's copy, see ``csrc/gradients/grad_aliasing.h``. The schemas say that the
    op, and ``end_reads`` before it, write to what ``weight_view`` returned. Inductor delays pointwise readers until it
    lowers an op that writes their input. It then computes them, but after that op. So ``end_reads``, which writes
    nothing, comes first, and the reduction follows the readers.
    """
    viewed = weight_views(graph)
    if not viewed:
        return graph
    position = {node: number for number, node in enumerate(graph.nodes)}
    behind: dict[Node, Node] = {}  # maps a last reader to the last op inserted after it
    for node in nodes_in_role(graph, Role.REDUCE):
        grads, shards = _arguments(node)
        views = [view for shard in shards for view in viewed.get(shard, [])]
        if not views:
            continue
        users: set[Node] = set().union(*map(users_of_forms, views))
        uses = (user for user in users if user in position and user.op != "output")
        last = max((node, *uses), key=position.__getitem__)
        with graph.inserting_after(behind.get(last, last)):
            ordered = behind[last] = graph.call_function(ops("reduce_after_reads"), (grads, shards, views))
        with graph.inserting_before(ordered):
            graph.call_function(ops("end_reads"), (views, shards)).meta["val"] = None
        ordered.meta["val"] = None
        ordered.meta["weights"] = node.meta.get("weights") or (weight_name(node),)
        graph.erase_node(node)
    return graph


def zero_copy_gradients(graph: Graph, in_flight: int = 2) -> Graph:
    """Let the executor send gradients from the graph's memory without a copy, in place.

    The memory must not be reused before the executor has read it. ``reduce_release`` keeps each group alive until
    ``in_flight`` later groups were enqueued, or until the end. This works only for results of matrix products: Inductor
    may recompute other values at each use, at another address.
    """
    groups: list[tuple[list[Node], list[Node]]] = []
    for node in nodes_in_role(graph, Role.REDUCE):
        grads, shards, *read = _arguments(node)
        zero_copy = [int(_is_product(grad)) for grad in grads]
        if not any(zero_copy):
            continue
        with graph.inserting_before(node):
            if len(groups) >= in_flight:
                _release(graph, *groups[-in_flight])
            call = graph.call_function(ops("reduce_zero_copy"), (grads, shards, zero_copy, *(read or [[]])))
        call.meta["val"] = None
        call.meta["weights"] = node.meta.get("weights") or (weight_name(node),)
        graph.erase_node(node)
        pairs = [(grad, shard) for grad, shard, yes in zip(grads, shards, zero_copy, strict=True) if yes]
        groups.append(([grad for grad, _ in pairs], [shard for _, shard in pairs]))
    with graph.inserting_before(output_node(graph)):
        for group in groups[-in_flight:]:
            _release(graph, *group)
    return graph


def _arguments(node: Node) -> list[list[Node]]:
    """Return gradients, shards, and for ``reduce_after_reads`` the weights that the graph reads, as lists."""
    args: Any = node.args
    return [[arg] if isinstance(arg, Node) else list(arg) for arg in args]


def _release(graph: Graph, grads: list[Node], shards: list[Node]) -> None:
    graph.call_function(ops("reduce_release"), (grads, shards)).meta["val"] = None


_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    grouped_mm,
    SCALED_MM,
}


def _is_product(node: Node) -> bool:
    while is_view_or_cast(node) and cast_dtype(node) is None and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.target in _PRODUCTS


def _bytes(node: Node) -> int:
    grad = node.args[0]
    assert isinstance(grad, Node)
    return nbytes(grad.meta["val"])


def _skip_widening(node: Node) -> None:
    """Reduce ``view(grad)`` instead of ``view(cast(grad))``, if the cast only widens."""
    cast, views = node.args[0], list[Node]()
    assert isinstance(cast, Node)
    # Gradients of channels_last weights and of transposed weights are viewed after the cast.
    while cast.target in TRANSPOSES:
        views.insert(0, cast)
        [cast] = cast.all_input_nodes
    dtype = cast_dtype(cast)
    source = cast.args[0] if dtype is not None else None
    if not isinstance(source, Node) or source.meta["val"].dtype.itemsize >= dtype.itemsize:  # type: ignore[union-attr]
        return
    with node.graph.inserting_before(node):
        node.args = (repeat_views(node.graph, source, views), *node.args[1:])
    for left in (*reversed(views), cast):
        if not left.users:
            node.graph.erase_node(left)
