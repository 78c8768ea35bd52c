"""Gradients belong to the executor: backward graphs hand them over, and return none to autograd."""

from __future__ import annotations

from torch.fx import Graph, Node

from lightning_zero.compile.graph import cast_dtype, ops, output_node, reduces, weight_name
from lightning_zero.compile.passes.grouping import consecutive
from lightning_zero.profiling.tensors import nbytes

__all__ = ["group_reduces", "hand_over_gradients"]


def hand_over_gradients(graph: Graph) -> Graph:
    """``g = reduce(grad, s); return (..., g)`` becomes ``reduce_add(grad, s); return (..., None)``, in place.

    A cast of the gradient to a wider dtype is left out: the executor casts while it copies.

    A tied weight's gradients may be added up before they are returned: ``g = a + b`` of two reduces. Both are handed
    over; the sum of the placeholders they return is dropped.
    """
    handed = reduces(graph)
    if not handed:
        return graph
    ours = set(handed)
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and all(i in ours for i in node.all_input_nodes):
            ours.add(node)
    output = output_node(graph)
    returned = output.args[0]
    assert isinstance(returned, tuple | list)
    output.args = (tuple(None if value in ours else value for value in returned),)
    for node in reversed(list(graph.nodes)):
        if node in ours and node not in handed and not node.users:
            graph.erase_node(node)
    for node in handed:
        _skip_widening(node)
        assert not node.users, (
            f"the gradient {node} is used by {list(node.users)}; a pass must see every use of a reduce"
        )
        with graph.inserting_before(node):
            void = graph.call_function(ops("reduce_add"), node.args, node.kwargs)
        void.meta.update({key: value for key, value in node.meta.items() if key != "val"})
        void.meta["val"] = None
        graph.erase_node(node)
    return graph


def group_reduces(graph: Graph, group_bytes: int, parts: int) -> Graph:
    """Hands gradients over several at a time, in place: one call of the host for a block of the model.

    Args:
        group_bytes: at most so many bytes of gradients wait for the last of their group.
        parts: smaller groups where there are few gradients: about this many for the whole graph.
    """
    nodes = graph.find_nodes(op="call_function", target=ops("reduce_add"))
    limit = min(group_bytes, sum(map(_bytes, nodes)) // parts)
    for group in consecutive(nodes, limit, _bytes):
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


def _bytes(node: Node) -> int:
    grad = node.args[0]
    assert isinstance(grad, Node)
    return nbytes(grad.meta["val"])


def _skip_widening(node: Node) -> None:
    grad = node.args[0]
    assert isinstance(grad, Node)
    dtype = cast_dtype(grad)
    source = grad.args[0] if dtype is not None else None
    if isinstance(source, Node) and source.meta["val"].dtype.itemsize < dtype.itemsize:  # type: ignore[union-attr]
        node.args = (source, *node.args[1:])
        if not grad.users:
            grad.graph.erase_node(grad)
