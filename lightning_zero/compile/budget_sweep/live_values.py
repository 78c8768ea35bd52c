"""How long whole weights are there in a graph, and which activations lie in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from lightning_zero.compile.context import GROUPS_PER_GRAPH, PassContext
from lightning_zero.compile.fx_utils import calls, cast_dtype, gathers, is_view_or_cast, readers
from lightning_zero.compile.passes.pipeline import FIRST_GROUPS
from lightning_zero.compile.passes.gather_groups import split_into_groups, max_group_bytes
from lightning_zero.compile.passes.activation_offload import OFFLOAD, RELOAD
from lightning_zero.profiling.tensors import nbytes

__all__ = ["Stay", "on_host", "stays"]


def on_host(graph: Graph) -> set[Node]:
    """Activations that lie in the host's memory."""
    leave, come = ((name, f"{name}_start") for name in (OFFLOAD, RELOAD))
    found = {node for node in graph.nodes if any(calls(node, name) for name in leave)}
    return found | {node.args[0] for node in graph.nodes if any(calls(node, name) for name in come)}


@dataclass(frozen=True)
class Stay:
    """A whole weight, from the moment at which its group is started to that of its last use, both as positions of
    nodes."""

    begin: int
    end: int
    nbytes: int


def stays(graph: Graph, context: PassContext) -> list[Stay]:
    """Of all weights that a graph gathers: in groups, each started where the one before is first used. A weight that
    the graph returns, since backward needs it first, stays to the end."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    uses = {form: _uses(form, position) for gather in gathers(graph) for form in _forms(gather)}
    forms = sorted((form for form, at in uses.items() if at), key=lambda form: min(uses[form]))
    small = [form for form in forms if _size(form) <= context.small_bytes]
    large = [form for form in forms if _size(form) > context.small_bytes]
    limit = max_group_bytes(map(_size, large), context.group_bytes, GROUPS_PER_GRAPH)
    groups = split_into_groups(large, limit, _size, first=FIRST_GROUPS)
    first_use = [min(uses[group[0]]) for group in groups]
    found = [Stay(0, max(uses[form]), _size(form)) for form in small]
    for number, group in enumerate(groups):
        begin = first_use[number - 1] if number else first_use[0]
        found += [Stay(begin, max(uses[form]), _size(form)) for form in group]
    return found


def _uses(form: Node, position: dict[Node, int]) -> list[int]:
    narrow = cast_dtype(form) is not None
    return [position[user] for user in readers(form) if narrow or not _is_narrowing(user)]


def _forms(gather: Node) -> Sequence[Node]:
    """The weight in each dtype it is used in: compiled code gathers it in that."""
    pending, narrowed, wide = [gather], [], False
    while pending:
        for user in pending.pop().users:
            if _is_narrowing(user):
                narrowed.append(user)
            elif is_view_or_cast(user) and cast_dtype(user) is None:
                pending.append(user)
            else:
                wide = True
    return [*narrowed[:1], *([gather] if wide or not narrowed else [])]


def _is_narrowing(node: Node) -> bool:
    dtype, source = cast_dtype(node), node.args[0] if node.args else None
    return dtype is not None and isinstance(source, Node) and dtype.itemsize < source.meta["val"].dtype.itemsize


def _size(form: Node) -> int:
    return nbytes(form.meta["val"])
