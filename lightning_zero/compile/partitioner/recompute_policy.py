"""Which activations are saved where only a part of them may be.

torch chooses so that the least is computed again, and of layers that are alike the first ones are as good to it as any:
they are saved, and all others are computed again in one go where backward begins, when what the first ones saved is
there, too. So the peak is what it was. Here as many of each kind are saved, but evenly spaced: what is computed again
at once are the few layers between two that are saved.

Within a layer most products are worth the same for their bytes, too. Of these the smaller ones are saved: they are what
layers hand on. Where the wide ones inside of layers are saved in their place, each layer's input has to be computed
again from the first layer's on before backward begins. Under a budget of 0.3 that took more than no budget at all.
The last product is saved besides, whatever the budget; and so is what sums up something much larger (a norm's scale,
what a loss divides by), which takes next to nothing, and which torch, that adds up worths in float32, takes for
worthless beside products. Computed again, sums over logits had these lie in memory in float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from math import log2
from pathlib import Path
from typing import Any

from torch.fx import Graph, Node

from lightning_zero.compat.compiler import CustomKnapsackSolver, knapsack
from lightning_zero.compile.fx_utils import draws
from lightning_zero.profiling import cost
from lightning_zero.profiling.tensors import nbytes

__all__ = ["EvenKnapsack", "partitioner_settings", "space_evenly"]


TIE = 0.02  # the share by which a product is worth more than one of twice its bytes and operations
SMALL = 64  # times smaller than what it reads
LEAST = 1e-6  # of a size, in shares of all: what has none is worth no more than that
UNITS = 10_000  # of all, in which torch counts sizes


def partitioner_settings(budget: float) -> dict[str, Any]:
    """Settings of torch's partitioner: so much of what it would like to save may be, as a share."""
    return {"activation_memory_budget": budget, "activation_memory_budget_solver": EvenKnapsack()}


class EvenKnapsack(CustomKnapsackSolver):
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
        # Torch's own count runs the ops, and here, where nobody sees them run, says the same of all.
        flops = [max(cost.node_flops(node), 1) for node in nodes]
        place = {node: number for number, node in enumerate(joint_graph.nodes)}
        places = [place[node] for node in nodes]
        # Backward needs the last product, as logits, while all else that is saved is there, too: it takes nothing of
        # the peak to save it, and what computing it again needs would come on top.
        last = max((index for index, count in enumerate(flops) if count > 1), key=places.__getitem__, default=None)
        kept = {index for index, node in enumerate(nodes) if index == last or _sums_up(node)}
        others = [index for index in range(len(nodes)) if index not in kept]
        sizes = [memory[index] for index in others]
        _, saved, _ = knapsack(sizes, _worth([flops[index] for index in others], sizes), max_memory)
        kinds = [(memory[index], flops[index], nodes[index].target) for index in others]
        found = {others[index] for index in space_evenly(set(saved), kinds, [places[index] for index in others])}
        # Computed again they would draw other numbers (attention with dropout).
        found |= kept | {index for index, node in enumerate(nodes) if draws(node)}
        return sorted(found), sorted(set(range(len(nodes))) - found)

    def uuid(self) -> bytes:
        """Tells Inductor's cache which version of this has chosen."""
        return Path(__file__).read_bytes() + Path(cost.__file__).read_bytes()


def _sums_up(node: Node) -> bool:
    reads = sum(nbytes(source.meta.get("val")) for source in node.all_input_nodes)
    return nbytes(node.meta.get("val")) * SMALL <= reads


def _worth(flops: Sequence[int], sizes: Sequence[float]) -> list[float]:
    """Of each thing that could be saved, with what decides among those that are worth the same for their bytes, as
    torch counts these: of 24 layers a product has some 20 units, and rounding would decide more than that."""
    largest = max((LEAST, *sizes))
    return [
        count * (1 + TIE * log2(largest / max(size, LEAST))) * _counted(size)
        for count, size in zip(flops, sizes, strict=True)
    ]


def _counted(size: float) -> float:
    """How much more torch counts than there is."""
    units = round(size * UNITS)
    return units / (size * UNITS) if units else 1.0


def space_evenly(saved: AbstractSet[int], kinds: Sequence[Hashable], places: Sequence[int]) -> set[int]:
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
