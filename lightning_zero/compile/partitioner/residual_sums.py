"""Saves what a backward would compute again all at once, where it begins.

torch weighs what is saved by its bytes alone, as if what is computed again took none. Of a sum that runs through all
layers (a residual stream) it saves the parts. The last layer's backward, which is the first to run, needs the sum over
all of them; so all sums are computed again there, and each lies beside the parts of all layers until its own layer's
turn. Saving the sums themselves takes no more at that moment, and nobody needs those parts any more: of 24 layers under
a budget of 0.5 the peak was 5.9 GiB, of which sums took 1.5, and parts half of that.

Before that moment saved sums are more than saved parts, beside what the loss takes. Where that takes most of all, parts
are saved as torch has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.graphs import DESC, NO_VERSION_CHECK, RECOMPUTE
from lightning_zero.compile.fx_utils import output_node, results, weight_nodes
from lightning_zero.compile.passes.saved_weights import backward_nodes
from lightning_zero.profiling.cost import fusion_groups
from lightning_zero.profiling.tensors import Storage, nbytes, storages, view_base

__all__ = ["save_residual_sums"]


# Of a backward's gradients: so few have been computed when the first layer's backward needs its inputs.
BEGINNING = 0.15
# And so many are computed while what is worth saving lies there: a layer or two.
LONG = 0.05


class _Span(NamedTuple):
    """Of something in a backward: when it is read first and last, in gradients that have been computed by then."""

    first: float
    last: float


def save_residual_sums(forward: Graph, backward: Graph, outputs: int) -> int:
    """Changes both graphs, in place, behind their partition.

    Args:
        outputs: of forward, which the user, or autograd, gets; behind them is what is saved.

    Returns:
        How many tensors are saved that were not.
    """
    saved = [node for node in results(forward)[outputs:] if isinstance(node, Node)]
    given = {node.name: node for node in backward.find_nodes(op="placeholder")}
    # torch has unchecked ones in places of their own. Where names differ, nobody knows which is which.
    if not saved or saved[0].name not in given or any(node.meta.get(NO_VERSION_CHECK) for node in saved):
        return 0
    gradients = backward_nodes(backward)
    spans = _spans(backward, gradients)
    made = {node.name: node for node in forward.nodes if node.op == "call_function"}
    chain = {node for node in _long(backward, spans, len(gradients)) if _is_same(made.get(node.name), node)}
    inputs = {given[node.name] for node in saved if node.name in given}
    needed = _needed(backward, gradients)
    needless = needed - _needed(backward, gradients, chain)
    chain = {node for node in chain if not inputs.isdisjoint(needless & _sources(node, chain))}
    if not chain:
        return 0
    needless = needed - _needed(backward, gradients, chain)
    gone = needless & inputs
    most, then = _taken(backward, gradients, max(spans[node].first for node in chain))
    if sum(nbytes(node.meta["val"]) for node in gone) <= most - then:
        return 0
    in_order = [node for node in backward.nodes if node in chain]
    _save(forward, outputs, [made[node.name] for node in in_order], {node.name for node in gone})
    _take(backward, in_order, given[saved[0].name])
    for node in reversed(backward.nodes):
        if node in gone or (node in needless and node.op == "call_function"):
            backward.erase_node(node)
    return len(chain)


def _long(graph: Graph, spans: dict[Node, _Span], count: int) -> list[Node]:
    """What is computed again at the beginning, and lies there for long."""
    weights = weight_nodes(graph)
    return [
        node
        for node, span in spans.items()
        if node.op == "call_function"
        and node not in weights
        and view_base(node) is None
        and isinstance(node.meta.get("val"), Tensor)
        and node.meta.get(RECOMPUTE) is not CheckpointPolicy.MUST_RECOMPUTE
        and span.first <= BEGINNING * count
        and span.last - span.first > LONG * count
    ]


def _taken(graph: Graph, gradients: AbstractSet[Node], until: float) -> tuple[int, int]:
    """Bytes that gradients take, of those that are computed until so many have been: at once at most, and then. What
    code generators fuse is out of memory."""
    runs, held = fusion_groups(graph), storages(graph)
    when = {node: number for number, node in enumerate(graph.nodes)}
    last = {run: when[node] for node, run in runs.items()}
    when |= {node: last[run] for node, run in runs.items()}  # those of one kernel run at once
    first = [node for number, node in enumerate(n for n in graph.nodes if n in gradients) if number <= until]
    begin: dict[Storage, int] = {}
    end: dict[Storage, int] = {}
    for node in first:
        outside = [user for user in node.users if node not in runs or runs.get(user) != runs[node]]
        for storage in filter(None, held[node] if node.op == "call_function" and outside else ()):
            begin.setdefault(storage, when[node])
            end[storage] = max(end.get(storage, 0), *(when[user] for user in outside))
    moments = sorted({*begin.values(), when[first[-1]]})
    taken = [sum(one.nbytes for one in begin if begin[one] <= at <= end[one]) for at in moments]
    return max(taken), taken[moments.index(when[first[-1]])]


def _spans(graph: Graph, gradients: AbstractSet[Node]) -> dict[Node, _Span]:
    """Of all that is no gradient and that is read. What is computed again is so when it is read first."""
    clock = {node: number for number, node in enumerate(node for node in graph.nodes if node in gradients)}
    found: dict[Node, _Span] = {}
    for node in reversed(graph.nodes):
        if node in clock or node.op == "output":
            continue
        reads = [span for user in node.users if (span := _reading(user, clock, found)) is not None]
        if reads:
            found[node] = _Span(min(span.first for span in reads), max(span.last for span in reads))
    return found


def _reading(user: Node, clock: dict[Node, int], spans: dict[Node, _Span]) -> _Span | None:
    if user.op == "output":
        return _Span(len(clock), len(clock))
    if user in clock:
        return _Span(clock[user], clock[user])
    span = spans.get(user)
    return span if span is None or view_base(user) is not None else _Span(span.first, span.first)


def _is_same(made: Node | None, again: Node) -> bool:
    """Whether that is what forward makes."""
    if made is None or made.target is not again.target or not isinstance(made.meta.get("val"), Tensor):
        return False
    there, here = made.meta["val"], again.meta["val"]
    return (there.shape, there.stride(), there.dtype) == (here.shape, here.stride(), here.dtype)


def _needed(graph: Graph, gradients: AbstractSet[Node], chain: AbstractSet[Node] = frozenset()) -> set[Node]:
    """All that is read on the way to gradients, and to whatever has no reader, where what is in ``chain`` is there."""
    needed = {*gradients, *(node for node in graph.nodes if not node.users and node.op != "placeholder")}
    for node in reversed(graph.nodes):
        if node in needed and node not in chain:
            needed.update(node.all_input_nodes)
    return needed


def _sources(node: Node, chain: AbstractSet[Node]) -> set[Node]:
    """What it is computed from, where the rest of ``chain`` is there."""
    found: set[Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        source = pending.pop()
        if source not in found and source not in chain:
            found.add(source)
            pending += source.all_input_nodes
    return found


def _save(forward: Graph, outputs: int, more: Iterable[Node], less: AbstractSet[str]) -> None:
    """``more`` comes first of what is saved, ``less``, by names, is not saved any more."""
    output, before = output_node(forward), results(forward)
    kept = [value for value in before[outputs:] if not (isinstance(value, Node) and value.name in less)]
    output.args = ((*before[:outputs], *more, *kept),)
    described = output.meta.get(DESC)
    if described is not None:
        first, count = described[outputs], len(results(forward)) - outputs
        output.meta[DESC] = [*described[:outputs], *(replace(first, idx=index) for index in range(count))]


def _take(backward: Graph, chain: Iterable[Node], first: Node) -> None:
    """As inputs, in order, before the ``first`` of what was saved."""
    for node in chain:
        with backward.inserting_before(first):
            given = backward.placeholder(f"{node.name}_saved")
        given.meta = node.meta | ({DESC: first.meta[DESC]} if DESC in first.meta else {})
        name: Any = node.name
        node.replace_all_uses_with(given)
        backward.erase_node(node)
        given.name = given.target = name
