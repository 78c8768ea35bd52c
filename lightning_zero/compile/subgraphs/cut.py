"""Cut a graph, after our passes, into subgraphs between which our ops run.

Repetitions are cut at equal positions, so that equal layers give equal subgraphs wherever their weights and gradients
are transferred. An op of ours inside a subgraph moves before it if it can (gathers start and are waited for), or after
it if it reads a result (gradients are enqueued).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from lightning_zero.compat.tensors import wait_tensor
from lightning_zero.compile.fx_utils import is_reduce, output_node, users_of_forms, weight_views
from lightning_zero.compile.subgraphs.node_kinds import NodeKind, classify_nodes, is_kernel, reads
from lightning_zero.compile.subgraphs.node_order import NodeOrder, graph_work
from lightning_zero.compile.subgraphs.repeats import RepeatedRun, find_repeats
from lightning_zero.compile.subgraphs.subgraph import NodeSignatures, Subgraph, make_subgraph, symbol_inputs
from lightning_zero.profiling.graph_tensors import nodes_where

# Subgraphs per repetition: more give our ops better positions but cost more calls.
MAX_PARTS = 4
MIN_PERIOD = 6  # nodes; shorter repetitions are not worth a cut
REPEATED_SHARE = 0.3  # graphs with a smaller repeated share are compiled whole
_convolution = torch.ops.aten.convolution.default


def is_worth_cutting(graph: Graph) -> bool:
    """Return True if enough of a graph repeats to be worth cutting; passes do not change the result.

    Graphs with collectives other than ours stay whole. So do those with repeated convolutions, because Inductor chooses
    one memory layout for all convolutions of a graph.
    """
    work = graph_work(graph, classify_nodes(graph))
    if any(node.target is wait_tensor for node in work):
        return False
    runs = _runs(work, NodeSignatures())
    if any(node.target is _convolution for run in runs for node in work[run.start : run.stop]):
        return False
    return sum(run.stop - run.start - run.period for run in runs) >= max(1, REPEATED_SHARE * len(work))


def cut(graph: Graph, parts: int = MAX_PARTS) -> list[Subgraph | Node] | None:
    """Return subgraphs and the nodes between them in execution order; None if that is impossible.

    It is impossible if an op between subgraphs reads a result of a subgraph that needs the op.

    Args:
        graph: after the passes; not modified.
    """
    kinds, seen = classify_nodes(graph), NodeSignatures()
    order = NodeOrder(graph, kinds, seen)
    at = order.between(graph)
    cut_points = choose_cut_points(order, _runs(order.work, seen), sorted(set(at.values())), parts)
    return _assemble(graph, kinds, order.work, [0, *cut_points, len(order.work)], at, seen)


def _runs(work: Sequence[Node], signatures: NodeSignatures) -> list[RepeatedRun]:
    runs = find_repeats([signatures[node] for node in work], MIN_PERIOD)
    return [run for run in runs if nodes_where(work[run.start : run.start + run.period], is_kernel)]


def _assemble(
    graph: Graph,
    kinds: dict[Node, NodeKind],
    work: Sequence[Node],
    bounds: Sequence[int],
    at: dict[Node, int],
    signatures: NodeSignatures | None = None,
) -> list[Subgraph | Node] | None:
    subgraph_of = {
        node: number for number in range(len(bounds) - 1) for node in work[bounds[number] : bounds[number + 1]]
    }
    read = reads(graph, kinds)
    made_in = _SourceSubgraphs(read, subgraph_of)
    readers = _first_readers(graph, subgraph_of)
    viewed_until = _last_views(graph, subgraph_of)
    slots: list[list[Node]] = [[] for _ in bounds]  # before each subgraph, and after the last
    slot_of: dict[Node, int] = {}
    last_enqueued = 0  # slot of the last enqueued gradient; gradients stay in order
    for node, passed in at.items():
        slot = bisect_right(bounds, passed) - 1
        slot = min(slot, readers.get(node, slot))
        for one in read[node]:
            # After its inputs, and in order among other nodes between subgraphs.
            slot = max(slot, subgraph_of[one] + 1 if one in subgraph_of else slot_of.get(one, 0))
        if is_reduce(node):  # gradients may use the memory of weights that the graph reads itself
            slot = max(slot, *(viewed_until.get(one, 0) for one in node.all_input_nodes))
        if made_in[node]:
            slot = last_enqueued = max(slot, last_enqueued)
        slot_of[node] = slot
        slots[slot].append(node)
    outputs_of, symbols = _needed_outputs(graph, kinds, subgraph_of, read, made_in), symbol_inputs(graph)
    available = {node for node in graph.nodes if kinds[node] is NodeKind.INPUT or node.op == "get_attr"}
    steps: list[Subgraph | Node] = []
    for number, slot_nodes in enumerate(slots):
        for node in slot_nodes:
            for needed in [*_views_outside(node, kinds, available), node]:
                steps.append(needed)
                available.add(needed)
        if number + 1 < len(bounds):
            own = work[bounds[number] : bounds[number + 1]]
            steps.append(make_subgraph(own, outputs_of[number], kinds, symbols, signatures))
            available.update(outputs_of[number])
    steps += _views_outside(output_node(graph), kinds, available)
    return steps if _in_order(graph, kinds, steps) else None


class _SourceSubgraphs(dict[Node, AbstractSet[int]]):
    """Subgraphs whose compute nodes each node reads, through views."""

    def __init__(self, read: dict[Node, list[Node]], subgraph_of: dict[Node, int]) -> None:
        super().__init__()
        self._read, self._home = read, subgraph_of

    def __missing__(self, node: Node) -> AbstractSet[int]:
        found = self[node] = {self._home[one] for one in self._read[node] if one in self._home}
        return found


def _first_readers(graph: Graph, subgraph_of: dict[Node, int]) -> dict[Node, int]:
    """Return the first subgraph that reads each node's result through nodes that are not compute.

    Reordering may have moved compute nodes across a cut.
    """
    first: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        for user in node.users:
            if user in subgraph_of or user in first:
                subgraph = subgraph_of[user] if user in subgraph_of else first[user]
                if node not in first or subgraph < first[node]:
                    first[node] = subgraph
    return first


def _last_views(graph: Graph, subgraph_of: dict[Node, int]) -> dict[Node, int]:
    """Return for each shard the slot after the last subgraph that reads the executor's copy of its weight.

    Reordering may have moved readers behind the op that enqueues the gradient.
    """
    return {
        shard: max((subgraph_of.get(reader, -1) + 1 for view in views for reader in users_of_forms(view)), default=0)
        for shard, views in weight_views(graph).items()
    }


def _in_order(graph: Graph, kinds: dict[Node, NodeKind], steps: Sequence[Subgraph | Node]) -> bool:
    available = {node for node in graph.nodes if kinds[node] is NodeKind.INPUT or node.op == "get_attr"}
    for step in steps:
        reads, makes = (step.inputs, step.outputs) if isinstance(step, Subgraph) else (step.all_input_nodes, [step])
        if not available.issuperset(reads):
            return False
        available.update(makes)
    return available.issuperset(output_node(graph).all_input_nodes)


def _needed_outputs(
    graph: Graph,
    kinds: dict[Node, NodeKind],
    subgraph_of: dict[Node, int],
    read: dict[Node, list[Node]],
    source_subgraphs: _SourceSubgraphs,
) -> list[list[Node]]:
    """Return the outputs of each subgraph: compute nodes, and views of them, that others read."""
    outputs_of: list[dict[Node, None]] = [{} for _ in range(max(subgraph_of.values(), default=0) + 1)]
    for node in graph.nodes:
        if node in subgraph_of:
            for one in read[node]:
                if one in subgraph_of and subgraph_of[one] != subgraph_of[node]:
                    outputs_of[subgraph_of[one]][one] = None
        elif kinds[node] in (NodeKind.COMM, NodeKind.OUTPUT):
            for outside in node.all_input_nodes:
                for available in _exported(outside, kinds, subgraph_of, read, source_subgraphs):
                    outputs_of[
                        subgraph_of[available] if available in subgraph_of else max(source_subgraphs[available])
                    ][available] = None
    return [list(nodes) for nodes in outputs_of]


def _exported(
    node: Node,
    kinds: dict[Node, NodeKind],
    subgraph_of: dict[Node, int],
    read: dict[Node, list[Node]],
    source_subgraphs: _SourceSubgraphs,
) -> Sequence[Node]:
    """Return the values that a subgraph must return so that ``node`` can be read outside.

    It is the node itself if a single subgraph makes it, otherwise the bases of the view.
    """
    if node in subgraph_of:
        return (node,)
    if kinds[node] is not NodeKind.VIEW:
        return ()
    if len(source_subgraphs[node]) == 1 and NodeKind.COMM not in [kinds[one] for one in read[node]]:
        return (node,)
    return [one for one in read[node] if one in subgraph_of]


def _views_outside(node: Node, kinds: dict[Node, NodeKind], available: set[Node]) -> Iterator[Node]:
    """Yield the views and constants to make before ``node`` can run, in order."""
    for read in node.all_input_nodes:
        if kinds[read] is NodeKind.VIEW and read not in available:
            yield from _views_outside(read, kinds, available)
            available.add(read)
            yield read


# Bound on bytes that a cut adds to memory writes, as a share of all kernel results.
LOST_SHARE = 0.001


@dataclass(frozen=True)
class _Candidates:
    """Possible cuts.

    Attributes:
        possible: positions in order.
        done: by position: FLOPs before it.
        lost: by position: bytes that a cut adds.
        allowed: bound on added bytes.
    """

    possible: Sequence[int]
    done: Sequence[int]
    lost: Sequence[int]
    allowed: float

    def cheap(self, begin: int, end: int) -> list[int]:
        """Return positions in a range that add few bytes, or else the one that adds the fewest."""
        here = [place for place in self.possible if begin <= place < end]
        cheap = [place for place in here if self.lost[place] <= self.allowed]
        return cheap or sorted(here, key=lambda place: self.lost[place])[:1]


def choose_cut_points(order: NodeOrder, runs: Sequence[RepeatedRun], between: Sequence[int], parts: int) -> list[int]:
    """Return the positions in ``order.work`` before which the graph is cut, without 0 and the end.

    Args:
        between: positions of nodes between subgraphs.
    """
    done = [0]
    for effort in order.effort():
        done.append(done[-1] + effort)
    places = _Candidates(order.cut_points(), done, order.lost(), LOST_SHARE * order.written())
    cut_points: set[int] = set()
    at = 1
    for run in runs:
        chosen = _cuts_in_run(run, places, parts)
        cut_points |= {*chosen, *_cuts_near(between, places, at, min(chosen, default=run.start))}
        at = max(chosen, default=run.start) + 1
    cut_points |= _cuts_near(between, places, at, len(order.work))
    return sorted(cut_points - {0, len(order.work)})


def _cuts_in_run(run: RepeatedRun, places: _Candidates, parts: int) -> list[int]:
    """Cut every repetition at equal offsets, into parts of about equal FLOPs."""
    middle = run.start + (run.repetitions // 2) * run.period  # one repetition represents all
    begin = min(middle, run.stop - run.period)
    cheap = places.cheap(begin, begin + run.period)
    if not cheap:
        return []
    first = cheap[0]
    total = places.done[begin + run.period] - places.done[begin]
    done = {place: places.done[place] - places.done[first] for place in cheap}
    goals = (total * part / parts for part in range(1, parts))
    chosen = {first, *(min(cheap, key=lambda place: abs(done[place] - goal)) for goal in goals)}
    offsets = sorted(place - begin for place in chosen)
    repeated = (run.start + number * run.period + offset for number in range(run.repetitions + 1) for offset in offsets)
    return [place for place in repeated if place <= run.stop]


def _cuts_near(between: Sequence[int], places: _Candidates, begin: int, end: int) -> set[int]:
    """Return the nearest possible cuts before nodes between subgraphs, where nothing repeats."""
    cheap = places.cheap(begin, end)
    behind = (bisect_right(cheap, place) for place in between if begin <= place < end)
    return {cheap[number - 1] for number in behind if number}
