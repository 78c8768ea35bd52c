"""Compiles a graph by its pieces, each of which is compiled once, however often it occurs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

from torch.fx import GraphModule, Node

from lightning_zero.compat.graphs import USER_VISIBLE_OUTPUTS
from lightning_zero.compile.graph import output_node
from lightning_zero.compile.subgraphs.deferred_kernels import DeferredKernels
from lightning_zero.compile.subgraphs.inductor_calls import Compiled, compile_subgraph
from lightning_zero.compile.subgraphs.strides import check_strides
from lightning_zero.compile.subgraphs.subgraph import Subgraph
from lightning_zero.compile.subgraphs.subgraph_program import SubgraphProgram

__all__ = ["SubgraphCache", "lower"]


class SubgraphCache:
    """Pieces that have been compiled, for other graphs that have the same: those of a plan that is made again, or of an
    evaluation.

    Attributes:
        compiled: how many.
        found: how often a piece had been compiled before.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Compiled] = {}
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._count = count()
        self.compiled = self.found = 0

    def number(self, thing: Any) -> int:
        """Of something that no text describes. Not its id: a later graph's would get that of one that is gone, and run
        its piece."""
        if thing not in self._numbers:
            self._numbers[thing] = next(self._count)
        return self._numbers[thing]

    def get(self, key: Hashable, make: Callable[[], Compiled]) -> Compiled:
        if key in self._known:
            self.found += 1
        else:
            self._known[key] = make()
            self.compiled += 1
        return self._known[key]


def lower(
    module: GraphModule, cache: SubgraphCache, kernels: DeferredKernels, steps: Sequence[Subgraph | Node], **settings: Any
) -> SubgraphProgram:
    """What a graph that was cut does, as code.

    Args:
        module: the whole graph.
        cache: of pieces.
        kernels: of the pieces, which have to be finished before they run.
        steps: by :func:`~lightning_zero.compile.subgraphs.cut.cut`.
        settings: for Inductor, as it gives them to what compiles a graph.

    Raises:
        StrideMismatch: pieces would not go together.
    """
    settings = {**settings, "static_input_idxs": ()}
    with kernels.defer():
        compiled = [_compiled(module, step, cache, settings, kernels) for step in steps if isinstance(step, Subgraph)]
    return SubgraphProgram(module, steps, compiled)


def _compiled(
    module: GraphModule, subgraph: Subgraph, cache: SubgraphCache, settings: dict[str, Any], kernels: DeferredKernels
) -> Compiled:
    def make() -> Compiled:
        # What a piece returns is read by others, who were told its strides.
        output_node(subgraph.graph).meta[USER_VISIBLE_OUTPUTS] = list(range(len(subgraph.outputs)))
        inputs = [node.meta["val"] for node in subgraph.graph.find_nodes(op="placeholder")]
        compiled = compile_subgraph(GraphModule(module, subgraph.graph), inputs, settings)
        kernels.assign_to(compiled)
        check_strides(compiled, [node.meta.get("val") for node in subgraph.outputs])
        return compiled

    return cache.get(_fingerprint(module, subgraph, settings, cache.number), make)


def _fingerprint(
    module: GraphModule, subgraph: Subgraph, settings: dict[str, Any], number_of: Callable[[Any], int]
) -> Hashable:
    """Equal for pieces that do the same with the same layouts, whatever their nodes are called."""
    seen = subgraph.signatures
    names = {node: number for number, node in enumerate([*subgraph.inputs, *subgraph.steps])}
    does: list[Hashable] = [str(sorted((key, settings.get(key)) for key in ("is_backward", "is_inference")))]
    does += [seen.value(node, number_of) for node in subgraph.inputs]
    for node in subgraph.steps:
        called = node.op if node.op != "get_attr" else number_of(attrgetter(str(node.target))(module))
        signature = seen[node] if node.op != "get_attr" else None
        does.append((called, signature, seen.reads(node, names), seen.value(node, number_of)))
    return *does, *(names[node] for node in subgraph.outputs)
