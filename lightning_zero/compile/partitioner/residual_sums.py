"""Save residual sums instead of their summands if that lowers the peak.

torch's partitioner ignores the memory of recomputed values. It saves the summands of a sum through all layers (the
residual stream). The backward of the last layer runs first and needs the total, so all partial sums are recomputed then
and stay alive in addition to the summands. Saving the sums takes no more memory at that moment, and the summands are no
longer needed.

Before that moment saved sums take more memory than summands, in addition to the loss. If that is the peak, summands
stay saved.
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
from lightning_zero.profiling.graph_tensors import Storage, nbytes, storages, view_base
from lightning_zero.profiling.node_costs import fusion_groups

# Share of a backward's gradients by which the first recomputed sums are needed.
FIRST_SHARE = 0.15
# Minimum lifetime, as a share of the gradients (one or two layers), of a sum worth saving.
MIN_LIFETIME = 0.05


class _Span(NamedTuple):
    """First and last read of a value in a backward, in numbers of gradients computed before."""

    first: float
    last: float


def save_residual_sums(forward: Graph, backward: Graph, outputs: int) -> int:
    """Change both graphs in place after partitioning and return the number of newly saved tensors.

    Args:
        outputs: number of forward results that are outputs; saved tensors follow them.
    """
    saved = [node for node in results(forward)[outputs:] if isinstance(node, Node)]
    given = {node.name: node for node in backward.find_nodes(op="placeholder")}
    # torch passes unchecked tensors separately. If names differ, saved tensors cannot be matched.
    if not saved or saved[0].name not in given or any(node.meta.get(NO_VERSION_CHECK) for node in saved):
        return 0
    gradients = backward_nodes(backward)
    spans = _spans(backward, gradients)
    made = {node.name: node for node in forward.nodes if node.op == "call_function"}
    chain = {node for node in _long_lived(backward, spans, len(gradients)) if _is_same(made.get(node.name), node)}
    inputs = {given[node.name] for node in saved if node.name in given}
    needed = _needed(backward, gradients)
    needless = needed - _needed(backward, gradients, chain)
    chain = {node for node in chain if not inputs.isdisjoint(needless & _sources(node, chain))}
    if not chain:
        return 0
    needless = needed - _needed(backward, gradients, chain)
    gone = needless & inputs
    most, then = _gradient_bytes(backward, gradients, max(spans[node].first for node in chain))
    if sum(nbytes(node.meta["val"]) for node in gone) <= most - then:
        return 0
    in_order = [node for node in backward.nodes if node in chain]
    _save(forward, outputs, [made[node.name] for node in in_order], {node.name for node in gone})
    _make_inputs(backward, in_order, given[saved[0].name])
    for node in reversed(backward.nodes):
        if node in gone or (node in needless and node.op == "call_function"):
            backward.erase_node(node)
    return len(chain)


def _long_lived(graph: Graph, spans: dict[Node, _Span], count: int) -> list[Node]:
    weights = weight_nodes(graph)
    return [
        node
        for node, span in spans.items()
        if node.op == "call_function"
        and node not in weights
        and view_base(node) is None
        and isinstance(node.meta.get("val"), Tensor)
        and node.meta.get(RECOMPUTE) is not CheckpointPolicy.MUST_RECOMPUTE
        and span.first <= FIRST_SHARE * count
        and span.last - span.first > MIN_LIFETIME * count
    ]


def _gradient_bytes(graph: Graph, gradients: AbstractSet[Node], until: float) -> tuple[int, int]:
    """Return peak and final bytes of gradients until ``until`` are computed; fused values need no memory."""
    runs, held = fusion_groups(graph), storages(graph)
    when = {node: number for number, node in enumerate(graph.nodes)}
    last = {run: when[node] for node, run in runs.items()}
    when |= {node: last[run] for node, run in runs.items()}  # nodes of one kernel run together
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
    """Return the span of each value that is not a gradient; it is recomputed at its first read."""
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
    if made is None or made.target is not again.target or not isinstance(made.meta.get("val"), Tensor):
        return False
    there, here = made.meta["val"], again.meta["val"]
    return (there.shape, there.stride(), there.dtype) == (here.shape, here.stride(), here.dtype)


def _needed(graph: Graph, gradients: AbstractSet[Node], chain: AbstractSet[Node] = frozenset()) -> set[Node]:
    """Return all nodes needed for gradients and for nodes without readers, if ``chain`` is available."""
    needed = {*gradients, *(node for node in graph.nodes if not node.users and node.op != "placeholder")}
    for node in reversed(graph.nodes):
        if node in needed and node not in chain:
            needed.update(node.all_input_nodes)
    return needed


def _sources(node: Node, chain: AbstractSet[Node]) -> set[Node]:
    found: set[Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        source = pending.pop()
        if source not in found and source not in chain:
            found.add(source)
            pending += source.all_input_nodes
    return found


def _save(forward: Graph, outputs: int, more: Iterable[Node], less: AbstractSet[str]) -> None:
    """Put ``more`` first among saved tensors and remove those named in ``less``."""
    output, before = output_node(forward), results(forward)
    kept = [value for value in before[outputs:] if not (isinstance(value, Node) and value.name in less)]
    output.args = ((*before[:outputs], *more, *kept),)
    described = output.meta.get(DESC)
    if described is not None:
        first, count = described[outputs], len(results(forward)) - outputs
        output.meta[DESC] = [*described[:outputs], *(replace(first, idx=index) for index in range(count))]


def _make_inputs(backward: Graph, chain: Iterable[Node], first: Node) -> None:
    """Make nodes inputs of backward, in order, before the ``first`` saved tensor."""
    for node in chain:
        with backward.inserting_before(first):
            given = backward.placeholder(f"{node.name}_saved")
        given.meta = node.meta | ({DESC: first.meta[DESC]} if DESC in first.meta else {})
        name: Any = node.name
        node.replace_all_uses_with(given)
        backward.erase_node(node)
        given.name = given.target = name
