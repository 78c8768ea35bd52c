"""Which nodes of a joint graph one of its halves is made of."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, Node

from lightning_zero.compat.compiler import TracingContext, inductor_config
from lightning_zero.compat.lookup import module, private

partitioners = module("torch._functorch.partitioners")
# Orders a node behind others, such as the events of streams. (torch 2.11+)
control_deps = private("torch._inductor.fx_passes.control_dependencies.control_deps")

__all__ = ["does_more_in_a_copy", "needed"]


def needed(
    joint: Graph, inputs: Sequence[Node], outputs: Sequence[Any], half: str | None, does_more: Callable[[Node], bool]
) -> list[Node] | None:
    """What can be made of the inputs, and what of that is read, or does more than it returns; None where an output
    cannot be made of them, or torch 2.14 has rules of its own, for streams inside a graph."""
    behind, before = partitioners._must_be_in_backward, partitioners._must_be_in_forward
    apart = [other for other, own in ((behind, "backward"), (before, "forward")) if half != own]
    there, made = set(inputs), []
    for node in joint.nodes:
        if node.target is control_deps:
            return None
        if node in there or node.op in ("placeholder", "output") or any(other(node) for other in apart):
            continue
        if there.issuperset(node.all_input_nodes):
            there.add(node)
            made.append(node)
    read = {node for node in outputs if isinstance(node, Node)}
    if not there.issuperset(read):
        return None
    kept = []
    for node in reversed(made):
        if node in read or does_more(node):
            kept.append(node)
            read.update(node.all_input_nodes)
    return kept[::-1]


def does_more_in_a_copy() -> Callable[[Node], bool]:
    """As it is asked where code that is dead is left out: what draws numbers does where somebody counts on them."""
    draws = TracingContext.try_get() is None or inductor_config.fallback_random
    return lambda node: bool(node.is_impure(draws))
