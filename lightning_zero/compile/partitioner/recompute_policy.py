"""Choose which activations are saved under ``activation_memory_budget``.

torch's knapsack minimizes recompute and is indifferent among equal layers: it saves the first ones and recomputes the
rest in one burst, so the peak does not drop. :class:`EvenKnapsack` saves as many, evenly spaced.

Among products of equal worth per byte the smaller ones are saved, which layers pass to the next. Otherwise each layer's
input is recomputed from the first layer on. The last product and strong reductions (norm scales, loss denominators) are
always saved: they take little memory, and torch's float32 sum of worths loses the reductions.
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
from lightning_zero.compile.fx_utils import draws_random
from lightning_zero.profiling import node_costs as cost
from lightning_zero.profiling.graph_tensors import nbytes

TIE = 0.02  # share by which a product is worth more than one of twice its bytes and operations
REDUCTION_RATIO = 64  # ratio of read to written bytes of a strong reduction
MIN_SIZE = 1e-6  # bound below on sizes, as shares of the total; avoids division by 0
UNITS = 10_000  # units of the total in which torch counts sizes


def partitioner_settings(budget: float) -> dict[str, Any]:
    """Return settings of torch's partitioner that save at most this share of activations."""
    return {"activation_memory_budget": budget, "activation_memory_budget_solver": EvenKnapsack()}


class EvenKnapsack(CustomKnapsackSolver):
    """Knapsack solver that chooses as torch does, with evenly spaced nodes among equal ones."""

    def __call__(
        self, memory: list[float], joint_graph: Graph, max_memory: float, node_info: Any, nodes: Sequence[Node]
    ) -> tuple[list[int], list[int]]:
        """Return indices of saved and of recomputed nodes.

        Args:
            memory: size of each node, as a share of all that could be saved.
        """
        # torch counts by running the ops. Here these run under fake tensors, where its count is the same for all.
        flops = [max(cost.node_flops(node), 1) for node in nodes]
        place = {node: number for number, node in enumerate(joint_graph.nodes)}
        places = [place[node] for node in nodes]
        # Backward needs the last product (logits) while all other activations are alive. Saving it does not raise the
        # peak, and recomputing it would.
        last = max((index for index, count in enumerate(flops) if count > 1), key=places.__getitem__, default=None)
        kept = {index for index, node in enumerate(nodes) if index == last or _is_reduction(node)}
        others = [index for index in range(len(nodes)) if index not in kept]
        sizes = [memory[index] for index in others]
        _, saved, _ = knapsack(sizes, _worths([flops[index] for index in others], sizes), max_memory)
        kinds = [(memory[index], flops[index], nodes[index].target) for index in others]
        found = {others[index] for index in space_evenly(set(saved), kinds, [places[index] for index in others])}
        # Recomputed random ops (attention with dropout) would give other numbers.
        found |= kept | {index for index, node in enumerate(nodes) if draws_random(node)}
        return sorted(found), sorted(set(range(len(nodes))) - found)

    def uuid(self) -> bytes:
        """Identify this code in Inductor's cache key."""
        return Path(__file__).read_bytes() + Path(cost.__file__).read_bytes()


def _is_reduction(node: Node) -> bool:
    reads = sum(nbytes(source.meta.get("val")) for source in node.all_input_nodes)
    return nbytes(node.meta.get("val")) * REDUCTION_RATIO <= reads


def _worths(flops: Sequence[int], sizes: Sequence[float]) -> list[float]:
    """Return worths that also decide between nodes of equal worth per byte.

    torch rounds sizes to units. With 24 layers a product has about 20 units, so rounding would decide more than worths.
    """
    largest = max((MIN_SIZE, *sizes))
    return [
        count * (1 + TIE * log2(largest / max(size, MIN_SIZE))) * _rounding_ratio(size)
        for count, size in zip(flops, sizes, strict=True)
    ]


def _rounding_ratio(size: float) -> float:
    """Return the ratio of torch's rounded size to the size."""
    units = round(size * UNITS)
    return units / (size * UNITS) if units else 1.0


def space_evenly(saved: AbstractSet[int], kinds: Sequence[Hashable], places: Sequence[int]) -> set[int]:
    """Return as many indices of each kind as in ``saved``, evenly spaced among those of the kind.

    Args:
        kinds: of each node; nodes of one kind are equally good.
    """
    by_kind: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index in sorted(range(len(kinds)), key=places.__getitem__):
        by_kind[kinds[index]].append(index)
    found: set[int] = set()
    for members in by_kind.values():
        found.update(_space(members, sum(index in saved for index in members)))
    return found


def _space(members: Sequence[int], count: int) -> Iterable[int]:
    """Choose members so that gaps, including those at both ends, are equal."""
    if count == len(members):
        return members
    return (members[(number + 1) * len(members) // (count + 1)] for number in range(count))
