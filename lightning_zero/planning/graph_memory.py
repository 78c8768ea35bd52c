"""Estimate the peak memory of a compiled graph beyond its inputs, from the lifetimes of its tensors.

Generated code keeps fused intermediates in registers, and writes a result into an input of equal size that it reads
last. Unsharded weights arrive in groups, and gradients leave in groups, as the graph passes arrange both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from lightning_zero.compile.context import GROUPS_PER_GRAPH, PassContext
from lightning_zero.compile.fx_utils import (
    calls,
    cast_dtype,
    gathers,
    is_reduce,
    is_view_or_cast,
    output_node,
    readers,
    results,
    weight_nodes,
)
from lightning_zero.compile.passes.activation_offload import OFFLOAD, RELOAD
from lightning_zero.compile.passes.gather_groups import max_group_bytes, split_into_groups
from lightning_zero.compile.passes.pipeline import FIRST_GROUPS
from lightning_zero.profiling.graph_tensors import Storage, nbytes, storages
from lightning_zero.profiling.node_costs import fusion_groups

# The memory of each node's results. Storages are compared by identity, so all must come from one reading of a graph.
Storages = Mapping[Node, Sequence[Storage | None]]


@dataclass(frozen=True)
class Span:
    """Lifetime of a tensor between two positions of nodes; ``fused``: from a generated kernel."""

    nbytes: int
    begin: int
    end: int
    fused: bool = False


def graph_peak(graph: Graph, context: PassContext, saved: AbstractSet[Node], gradients: int, fuses: bool) -> int:
    """Return the peak bytes beyond those of the graph's inputs.

    Args:
        saved: inputs that the graph alone holds and frees after their last use.
        gradients: number of leading results that are gradients of weights, which are reduced and freed.
        fuses: code is generated; otherwise each op writes its result.
    """
    runs = fusion_groups(graph) if fuses else {}
    time, end = _times(graph, runs), len(graph.nodes)
    memory = storages(graph)
    reduced = _reduce_times(graph, memory, context, gradients)
    spans, freed = _spans(graph, memory, saved, reduced, time, runs)
    spans += weight_spans(graph, context)
    allocated: Counter[int] = Counter()
    released: Counter[int] = Counter()
    for span in spans:
        allocated[span.begin] += span.nbytes
        released[span.end] += span.nbytes
    for span in freed:
        released[span.end] += span.nbytes
    # Subgraphs do not overwrite their inputs, so freed inputs are reused only if graphs are compiled as a whole.
    reused = _reused_bytes(spans, freed if context.config.whole_graphs else ()) if fuses else {}
    alive = peak = 0
    for moment in range(end + 1):
        alive += allocated[moment]
        peak = max(peak, alive - reused.get(moment, 0))
        alive -= released[moment]
    return peak


def fresh_bytes(graph: Graph) -> int:
    """Return the bytes of the graph's results on the device, without memory of its inputs."""
    memory = storages(graph)
    inputs = {storage for node in graph.find_nodes(op="placeholder") for storage in memory[node]}
    on_host = host_activations(graph)
    returned = {s for node in output_node(graph).all_input_nodes if node not in on_host for s in memory[node]}
    return sum(storage.nbytes for storage in returned - inputs if storage is not None)


def leave_narrow(graph: Graph, gradients: int) -> None:
    """Return gradients in their computed dtype, in place: the executor casts while it copies."""
    returned = results(graph)
    output_node(graph).args = ((*map(_before_cast, returned[:gradients]), *returned[gradients:]),)
    graph.eliminate_dead_code()


def host_activations(graph: Graph) -> set[Node]:
    """Return the activations in host memory."""
    offload, reload = ((name, f"{name}_start") for name in (OFFLOAD, RELOAD))
    found = {node for node in graph.nodes if any(calls(node, name) for name in offload)}
    return found | {node.args[0] for node in graph.nodes if any(calls(node, name) for name in reload)}


def weight_spans(graph: Graph, context: PassContext) -> list[Span]:
    """Return the lifetimes of unsharded weights.

    A group is gathered at the first use of the one before. A weight that the graph returns lives to the end.
    """
    position = {node: number for number, node in enumerate(graph.nodes)}
    forms_of = ((gather, form) for gather in gathers(graph) for form in _gathered_forms(gather))
    reads = context.in_place
    uses = {form: _uses(form, position) for _, form in forms_of if reads is None or not reads.covers_form(form)}
    forms = sorted((form for form, at in uses.items() if at), key=lambda form: min(uses[form]))
    small = [form for form in forms if _bytes(form) <= context.small_bytes]
    large = [form for form in forms if _bytes(form) > context.small_bytes]
    limit = max_group_bytes(map(_bytes, large), context.group_bytes, GROUPS_PER_GRAPH)
    groups = split_into_groups(large, limit, _bytes, first=FIRST_GROUPS)
    first_use = [min(uses[group[0]]) for group in groups]
    found = [Span(_bytes(form), 0, max(uses[form])) for form in small]
    for number, group in enumerate(groups):
        begin = first_use[number - 1] if number else first_use[0]
        found += [Span(_bytes(form), begin, max(uses[form])) for form in group]
    return found


def _before_cast(gradient: Any) -> Any:
    source = gradient.args[0] if isinstance(gradient, Node) and gradient.args else None
    if not isinstance(source, Node) or not isinstance(gradient, Node):
        return gradient
    dtype = cast_dtype(gradient)
    return source if dtype is not None and source.meta["val"].dtype.itemsize < dtype.itemsize else gradient


def _times(graph: Graph, runs: Mapping[Node, int]) -> dict[Node, int]:
    """Return when each node runs: the nodes of one kernel run with its last node."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    last: dict[int, int] = {}
    for node, run in runs.items():
        last[run] = position[node]
    return {node: last[runs[node]] if node in runs else number for node, number in position.items()}


def _spans(
    graph: Graph,
    memory: Storages,
    saved: AbstractSet[Node],
    reduced: dict[Storage, int],
    time: dict[Node, int],
    runs: Mapping[Node, int],
) -> tuple[list[Span], list[Span]]:
    """Return the lifetimes of the graph's own tensors, and those of inputs that it frees."""
    weights, makers = weight_nodes(graph) | host_activations(graph), {}
    begin: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    written: set[Storage] = set()  # read outside of the kernel that makes them
    for node in graph.nodes:
        mine = [storage for storage in memory[node] if storage is not None]
        for storage in mine:
            if storage not in begin:
                begin[storage], makers[storage] = time[node], node
            last[storage] = max(last.get(storage, 0), time[node])
        for source in node.all_input_nodes:
            for storage in filter(None, memory[source]):
                until = len(time) if node.op == "output" else time[node]
                last[storage] = max(last.get(storage, 0), until)
                if storage not in mine and (makers[storage] not in runs or runs.get(node) != runs[makers[storage]]):
                    written.add(storage)
    made, freed = [], []
    for storage, maker in makers.items():
        if maker.op in ("placeholder", "get_attr"):
            if maker in saved:
                freed.append(Span(storage.nbytes, 0, last[storage]))
        elif maker not in weights and (maker not in runs or storage in written):
            until = max(reduced[storage], begin[storage]) if storage in reduced else last[storage]
            made.append(Span(storage.nbytes, begin[storage], until, maker in runs))
    return made, freed


def _reduce_times(graph: Graph, memory: Storages, context: PassContext, gradients: int) -> dict[Storage, int]:
    """Return when each gradient has been enqueued for its reduction, in groups."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    found = [value for value in results(graph)[:gradients] if isinstance(value, Node)]
    found += [node.args[0] for node in graph.nodes if is_reduce(node) and isinstance(node.args[0], Node)]
    found.sort(key=position.__getitem__)
    sizes = [_bytes(node) for node in found]
    limit = min(context.config.reduce_group_mb * 2**20, sum(sizes) / GROUPS_PER_GRAPH)
    times: dict[Storage, int] = {}
    waiting: list[Node] = []
    for number, node in enumerate(found):
        waiting.append(node)
        following = sizes[number + 1] if number + 1 < len(sizes) else limit + 1
        if sum(map(_bytes, waiting)) + following > limit:
            for one in waiting:
                for storage in filter(None, memory[one]):
                    times[storage] = position[node]
            waiting = []
    return times


def _reused_bytes(spans: Sequence[Span], freed: Sequence[Span]) -> dict[int, int]:
    """Return by moment the bytes of generated results that overwrite an input read for the last time."""
    dying: dict[int, Counter[int]] = {}
    for span in (*spans, *freed):
        dying.setdefault(span.end, Counter())[span.nbytes] += 1
    found: dict[int, int] = {}
    for span in spans:
        free = dying.get(span.begin, Counter())
        if span.fused and span.end > span.begin and free[span.nbytes] > 0:
            free[span.nbytes] -= 1
            found[span.begin] = found.get(span.begin, 0) + span.nbytes
    return found


def _uses(form: Node, position: dict[Node, int]) -> list[int]:
    narrow = cast_dtype(form) is not None
    return [position[user] for user in readers(form) if narrow or not _narrows(user)]


def _gathered_forms(gather: Node) -> Sequence[Node]:
    """Return a weight in each dtype that the graph uses: compiled code gathers it in that dtype."""
    pending, narrowed, wide = [gather], [], False
    while pending:
        for user in pending.pop().users:
            if _narrows(user):
                narrowed.append(user)
            elif is_view_or_cast(user) and cast_dtype(user) is None:
                pending.append(user)
            else:
                wide = True
    return [*narrowed[:1], *([gather] if wide or not narrowed else [])]


def _narrows(node: Node) -> bool:
    dtype, source = cast_dtype(node), node.args[0] if node.args else None
    return dtype is not None and isinstance(source, Node) and dtype.itemsize < source.meta["val"].dtype.itemsize


def _bytes(node: Node) -> int:
    return nbytes(node.meta["val"])
