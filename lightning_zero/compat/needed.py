"""Which nodes of a joint graph one of its halves is made of."""

from collections.abc import Callable, Sequence
from typing import Any

from torch._functorch import partitioners
from torch.fx import Graph, Node

from lightning_zero.compat.compiler import TracingContext, inductor_config

__all__ = ["does_more_in_a_copy", "needed"]


def needed(
    joint: Graph, inputs: Sequence[Node], outputs: Sequence[Any], half: str | None, does_more: Callable[[Node], bool]
) -> list[Node] | None:
    """What can be made of the inputs, and what of that is read, or does more than it returns; None where an output
    cannot be made of them."""
    # Whether a node is tagged as the other half's, or writes into what is. (torch 2.11+)
    behind, before = partitioners._must_be_in_backward, partitioners._must_be_in_forward
    apart = [other for other, own in ((behind, "backward"), (before, "forward")) if half != own]
    there, made = set(inputs), []
    for node in joint.nodes:
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
