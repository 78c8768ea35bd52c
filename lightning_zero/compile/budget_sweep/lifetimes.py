"""How many bytes a compiled graph takes beyond those that are there when it begins.

Generated code keeps what it fuses out of memory: of elementwise ops and reductions that follow one another only what
somebody else reads is written, and where an input of the same size is read for the last time, it is written into that.
Whole weights come in groups, and gradients of weights leave in groups, as the passes arrange both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from lightning_zero.compile.budget_sweep.live_values import on_host, stays
from lightning_zero.compile.context import GROUPS_PER_GRAPH, PassContext
from lightning_zero.compile.fx_utils import cast_dtype, is_reduce, output_node, results, weight_nodes
from lightning_zero.profiling.cost import fusion_groups
from lightning_zero.profiling.tensors import Storage, nbytes, storages

__all__ = ["fresh_bytes", "graph_peak", "leave_narrow"]

# The memory of each node's results. Storages are compared by identity, so that all here have to be of one reading.
Held = Mapping[Node, Sequence[Storage | None]]


@dataclass
class Span:
    """A tensor in memory, from its first moment to its last; both are positions of nodes."""

    nbytes: int
    begin: int
    end: int
    fused: bool = False


def graph_peak(graph: Graph, context: PassContext, saved: AbstractSet[Node], gradients: int, fuses: bool) -> int:
    """The most bytes at once, beyond those of the graph's inputs.

    Args:
        saved: inputs that nobody else holds: they go with their last use.
        gradients: so many of the first results are gradients of weights, which leave; so do those that the graph hands
            over itself.
        fuses: code is generated; otherwise each op writes its result.
    """
    runs = fusion_groups(graph) if fuses else {}
    time, end = _clock(graph, runs), len(graph.nodes)
    held = storages(graph)
    left = _leaving(graph, held, context, gradients)
    spans, gone = _spans(graph, held, saved, left, time, runs)
    for stay in stays(graph, context):
        spans.append(Span(stay.nbytes, stay.begin, stay.end))
    coming: Counter[int] = Counter()
    going: Counter[int] = Counter()
    for span in spans:
        coming[span.begin] += span.nbytes
        going[span.end] += span.nbytes
    for span in gone:
        going[span.end] += span.nbytes
    # What is compiled in pieces, as most is, never overwrites what a piece was given.
    reused = _reused(spans, gone if context.config.whole_graphs else ()) if fuses else {}
    alive = peak = 0
    for moment in range(end + 1):
        alive += coming[moment]
        peak = max(peak, alive - reused.get(moment, 0))
        alive -= going[moment]
    return peak


def fresh_bytes(graph: Graph) -> int:
    """Of the memory that a graph's results lie in, unless it came in, or is the host's."""
    held = storages(graph)
    came = {storage for node in graph.find_nodes(op="placeholder") for storage in held[node]}
    away = on_host(graph)
    returned = {storage for node in output_node(graph).all_input_nodes if node not in away for storage in held[node]}
    return sum(storage.nbytes for storage in returned - came if storage is not None)


def leave_narrow(graph: Graph, gradients: int) -> None:
    """The first ``gradients`` results leave before they are cast to their weights' dtypes, in place: the executor casts
    while it copies."""
    returned = results(graph)
    output_node(graph).args = ((*map(_computed, returned[:gradients]), *returned[gradients:]),)
    graph.eliminate_dead_code()


def _computed(gradient: Any) -> Any:
    source = gradient.args[0] if isinstance(gradient, Node) and gradient.args else None
    if not isinstance(source, Node) or not isinstance(gradient, Node):
        return gradient
    dtype = cast_dtype(gradient)
    return source if dtype is not None and source.meta["val"].dtype.itemsize < dtype.itemsize else gradient


def _clock(graph: Graph, runs: Mapping[Node, int]) -> dict[Node, int]:
    """When each node runs. Those of one kernel run at once, when the last of them does."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    last: dict[int, int] = {}
    for node, run in runs.items():
        last[run] = position[node]
    return {node: last[runs[node]] if node in runs else number for node, number in position.items()}


def _spans(
    graph: Graph,
    held: Held,
    saved: AbstractSet[Node],
    left: dict[Storage, int],
    time: dict[Node, int],
    runs: Mapping[Node, int],
) -> tuple[list[Span], list[Span]]:
    """Tensors that the graph makes, and inputs of which it lets go."""
    weights, makers = weight_nodes(graph) | on_host(graph), {}
    begin: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    outside: set[Storage] = set()  # read by another kernel than its own
    for node in graph.nodes:
        mine = [storage for storage in held[node] if storage is not None]
        for storage in mine:
            if storage not in begin:
                begin[storage], makers[storage] = time[node], node
            last[storage] = max(last.get(storage, 0), time[node])
        for source in node.all_input_nodes:
            for storage in filter(None, held[source]):
                until = len(time) if node.op == "output" else time[node]
                last[storage] = max(last.get(storage, 0), until)
                if storage not in mine and (makers[storage] not in runs or runs.get(node) != runs[makers[storage]]):
                    outside.add(storage)
    made, gone = [], []
    for storage, maker in makers.items():
        if maker.op in ("placeholder", "get_attr"):
            if maker in saved:
                gone.append(Span(storage.nbytes, 0, last[storage]))
        elif maker not in weights and (maker not in runs or storage in outside):
            until = max(left[storage], begin[storage]) if storage in left else last[storage]
            made.append(Span(storage.nbytes, begin[storage], until, maker in runs))
    return made, gone


def _leaving(graph: Graph, held: Held, context: PassContext, gradients: int) -> dict[Storage, int]:
    """When the gradients of weights have been handed over: a group of them at once, in the dtype in which they are
    computed."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    brought = [value for value in results(graph)[:gradients] if isinstance(value, Node)]
    brought += [node.args[0] for node in graph.nodes if is_reduce(node) and isinstance(node.args[0], Node)]
    brought.sort(key=position.__getitem__)
    sizes = [nbytes(node.meta["val"]) for node in brought]
    limit = min(context.config.reduce_group_mb * 2**20, sum(sizes) / GROUPS_PER_GRAPH)
    found: dict[Storage, int] = {}
    waiting: list[Node] = []
    for number, node in enumerate(brought):
        waiting.append(node)
        following = sizes[number + 1] if number + 1 < len(sizes) else limit + 1
        if sum(nbytes(one.meta["val"]) for one in waiting) + following > limit:
            for one in waiting:
                for storage in filter(None, held[one]):
                    found[storage] = position[node]
            waiting = []
    return found


def _reused(spans: Sequence[Span], gone: Sequence[Span]) -> dict[int, int]:
    """By moment: bytes of results of generated kernels that lie where an input was read for the last time."""
    dying: dict[int, Counter[int]] = {}
    for span in (*spans, *gone):
        dying.setdefault(span.end, Counter())[span.nbytes] += 1
    found: dict[int, int] = {}
    for span in spans:
        free = dying.get(span.begin, Counter())
        if span.fused and span.end > span.begin and free[span.nbytes] > 0:
            free[span.nbytes] -= 1
            found[span.begin] = found.get(span.begin, 0) + span.nbytes
    return found
