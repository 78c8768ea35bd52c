"""Cuts a graph that our passes have gone over into pieces, between which our own ops run.

What repeats is cut at the same places each time, so that equal layers make equal pieces, wherever their weights and
gradients travel. An op that stood in the middle of a piece runs before it where it can (gathers are launched and waited
for), and behind it where it needs what the piece makes (gradients are handed over).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.fx import Graph, Node

from lightning_zero.compat.ops import wait_tensor
from lightning_zero.compile.graph import output_node
from lightning_zero.compile.pieces.kinds import Asked, Kind, all_read, is_kernel, kinds_of, shape, signature
from lightning_zero.compile.pieces.order import Order, graph_work
from lightning_zero.compile.pieces.piece import Piece, make_piece, symbol_inputs
from lightning_zero.compile.pieces.repeats import Run, find_runs
from lightning_zero.compile.pieces.seams import choose_seams

__all__ = ["PARTS", "cut", "repeats"]

# Where our ops can run within a layer; more places let them come closer to where they are needed, for more calls.
PARTS = 4
SHORTEST = 6  # nodes: what repeats in fewer is not worth a cut
REPEATED_SHARE = 0.3  # a graph of which less repeats is compiled as a whole
_convolution = torch.ops.aten.convolution.default


def repeats(graph: Graph) -> bool:
    """Whether enough of a graph repeats that it is worth being cut; the passes do not change that.

    Graphs stay whole in which ranks wait for each other by more than our own ops, and whose repeated parts convolve:
    the code generator chooses one layout of memory for all convolutions of a graph.
    """
    work = list(graph_work(graph, kinds_of(graph)))
    if any(node.target is wait_tensor for node in work):
        return False
    runs = _runs(work)
    if any(node.target is _convolution for run in runs for node in work[run.start : run.stop]):
        return False
    return sum(run.stop - run.start - run.period for run in runs) >= max(1, REPEATED_SHARE * len(work))


def cut(graph: Graph, parts: int = PARTS) -> list[Piece | Node] | None:
    """What runs one after the other: pieces, and nodes between them. None where an op between pieces needs what the
    piece makes that needs it.

    Args:
        graph: after the passes; is not changed.
        parts: at most so many pieces for each repetition.
    """
    kinds = kinds_of(graph)
    order = Order(graph, kinds)
    at = order.between(graph)
    seams = choose_seams(order, _runs(order.work), sorted(set(at.values())), parts)
    return _assemble(graph, kinds, order.work, [0, *seams, len(order.work)], at)


def _runs(work: Sequence[Node]) -> list[Run]:
    shapes = Asked(shape)
    runs = find_runs([signature(node, shapes) for node in work], SHORTEST)
    return [run for run in runs if any(map(is_kernel, work[run.start : run.start + run.period]))]


def _assemble(
    graph: Graph, kinds: dict[Node, Kind], work: Sequence[Node], bounds: Sequence[int], at: dict[Node, int]
) -> list[Piece | Node] | None:
    home = {node: number for number in range(len(bounds) - 1) for node in work[bounds[number] : bounds[number + 1]]}
    seen = {node: _homes(node, kinds, home) for node in graph.nodes if kinds[node] in (Kind.FREE, Kind.BETWEEN)}
    readers = _first_readers(graph, home)
    slots: list[list[Node]] = [[] for _ in bounds]  # before each piece, and behind the last
    slot_of: dict[Node, int] = {}
    handed = 0  # where gradients were handed over last: what concerns them stays in order
    for node, passed in at.items():
        piece = bisect_right(bounds, passed) - 1
        piece = min(piece, readers.get(node, piece))
        needs = max((number + 1 for number in seen[node]), default=0)
        after = max((slot_of[read] for read in _between(node, kinds)), default=0)
        slot_of[node] = max(piece, needs, after, handed if seen[node] else 0)
        handed = max(handed, slot_of[node]) if seen[node] else handed
        slots[slot_of[node]].append(node)
    made = {node for node in graph.nodes if kinds[node] is Kind.INPUT or node.op == "get_attr"}
    wanted, symbols = _wanted(graph, kinds, home), symbol_inputs(graph)
    steps: list[Piece | Node] = []
    for number, slot in enumerate(slots):
        for node in slot:
            for needed in [*_views_outside(node, kinds, made), node]:
                steps.append(needed)
                made.add(needed)
        if number + 1 < len(bounds):
            steps.append(make_piece(work[bounds[number] : bounds[number + 1]], wanted[number], kinds, symbols))
            made.update(wanted[number])
    steps += _views_outside(output_node(graph), kinds, made)
    return steps if _in_order(graph, kinds, steps) else None


def _first_readers(graph: Graph, home: dict[Node, int]) -> dict[Node, int]:
    """The first piece that reads a node's result, through whatever is no work. Work may have been moved to the other
    side of a cut than what it reads."""
    first: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        pieces = [home[user] if user in home else first[user] for user in node.users if user in home or user in first]
        if pieces:
            first[node] = min(pieces)
    return first


def _in_order(graph: Graph, kinds: dict[Node, Kind], steps: Sequence[Piece | Node]) -> bool:
    """Whether each step reads only what is there."""
    made = {node for node in graph.nodes if kinds[node] is Kind.INPUT or node.op == "get_attr"}
    for step in steps:
        reads, makes = (step.inputs, step.outputs) if isinstance(step, Piece) else (step.all_input_nodes, [step])
        if not made.issuperset(reads):
            return False
        made.update(makes)
    return made.issuperset(output_node(graph).all_input_nodes)


def _homes(node: Node, kinds: dict[Node, Kind], home: dict[Node, int]) -> set[int]:
    """Pieces whose work a node reads, through views."""
    return {home[read] for read in _work_read(node, kinds, home)}


def _between(node: Node, kinds: dict[Node, Kind]) -> Iterator[Node]:
    """Nodes between pieces that a node reads, through views."""
    return (read for read in all_read(node, kinds) if kinds[read] is Kind.BETWEEN)


def _wanted(graph: Graph, kinds: dict[Node, Kind], home: dict[Node, int]) -> list[list[Node]]:
    """What each piece has to return: work that others read, and views of it that leave the pieces."""
    wanted: dict[int, dict[Node, None]] = {}
    for node in graph.nodes:
        if kinds[node] in (Kind.BETWEEN, Kind.OUTPUT):
            for read in node.all_input_nodes:
                for made in _leaving(read, kinds, home):
                    wanted.setdefault(_home(made, kinds, home), {})[made] = None
        elif node in home:
            for read in _work_read(node, kinds, home):
                if home[read] != home[node]:
                    wanted.setdefault(home[read], {})[read] = None
    return [list(wanted.get(number, ())) for number in range(max(home.values(), default=0) + 1)]


def _home(node: Node, kinds: dict[Node, Kind], home: dict[Node, int]) -> int:
    return home[node] if node in home else max(_homes(node, kinds, home))


def _leaving(node: Node, kinds: dict[Node, Kind], home: dict[Node, int]) -> Iterable[Node]:
    """What has to leave a piece so that ``node`` can be read outside: itself, where one piece alone makes it; otherwise
    what it is a view of."""
    if node in home:
        return [node]
    if kinds[node] is not Kind.FREE:
        return []
    if len(_homes(node, kinds, home)) == 1 and not list(_between(node, kinds)):
        return [node]
    return list(_work_read(node, kinds, home))


def _work_read(node: Node, kinds: dict[Node, Kind], home: dict[Node, int]) -> Iterator[Node]:
    return (read for read in all_read(node, kinds) if read in home)


def _views_outside(node: Node, kinds: dict[Node, Kind], made: set[Node]) -> Iterator[Node]:
    """Views and constants that have to be made before ``node`` can run, in order."""
    for read in node.all_input_nodes:
        if kinds[read] is Kind.FREE and read not in made:
            yield from _views_outside(read, kinds, made)
            made.add(read)
            yield read
