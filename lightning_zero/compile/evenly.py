"""Which activations are saved where only a part of them may be.

torch chooses so that the least is computed again, and of layers that are alike the first ones are as good to it as any:
they are saved, and all others are computed again in one go where backward begins, when what the first ones saved is
there, too. So the peak is what it was. Here as many of each kind are saved, but evenly spaced: what is computed again
at once are the few layers between two that are saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from torch.fx import Graph, Node

from lightning_zero.compat.compiler import CustomKnapsackSolver, estimate_runtime, knapsack

__all__ = ["SavedEvenly", "evenly", "saved_within"]


def saved_within(budget: float) -> dict[str, Any]:
    """Settings of torch's partitioner: so much of what it would like to save may be, as a share."""
    return {"activation_memory_budget": budget, "activation_memory_budget_solver": SavedEvenly()}


class SavedEvenly(CustomKnapsackSolver):
    """Torch's choice, with the places among equals exchanged."""

    def __call__(
        self, memory: list[float], joint_graph: Graph, max_memory: float, node_info: Any, nodes: Sequence[Node]
    ) -> tuple[list[int], list[int]]:
        """Indices of what is saved, and of what is computed again.

        Args:
            memory: of each of the nodes, as a share of all that could be saved.
            max_memory: that may be.
            node_info: torch's own.
            nodes: that could be saved.
        """
        seconds = [estimate_runtime(node) for node in nodes]
        _, saved, _ = knapsack(memory, seconds, max_memory)
        place = {node: number for number, node in enumerate(joint_graph.nodes)}
        kinds = list(zip(memory, seconds, (node.target for node in nodes), strict=True))
        found = evenly(set(saved), kinds, [place[node] for node in nodes])
        return sorted(found), sorted(set(range(len(nodes))) - found)

    def uuid(self) -> bytes:
        """Tells Inductor's cache which version of this has chosen."""
        return Path(__file__).read_bytes()


def evenly(saved: AbstractSet[int], kinds: Sequence[Hashable], places: Sequence[int]) -> set[int]:
    """As many of each kind as in ``saved``, evenly spaced among those of its kind.

    Args:
        saved: indices.
        kinds: of each thing; those of one kind are as good as each other.
        places: in which order they come.
    """
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index in sorted(range(len(kinds)), key=places.__getitem__):
        alike[kinds[index]].append(index)
    found: set[int] = set()
    for members in alike.values():
        found.update(_spaced(members, sum(index in saved for index in members)))
    return found


def _spaced(members: Sequence[int], count: int) -> Iterable[int]:
    """So that stretches between them, and before the first and behind the last, are as long as each other."""
    if count == len(members):
        return members
    return (members[(number + 1) * len(members) // (count + 1)] for number in range(count))
