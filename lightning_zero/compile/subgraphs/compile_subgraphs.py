"""Compile the subgraphs of a graph, each distinct one once.

Inductor's graph passes change layouts (padded matrix products) without updating later nodes. A whole graph is not
affected, but subgraphs are compiled for the recorded strides, so these are fixed first and checked afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.graphs import USER_VISIBLE_OUTPUTS
from lightning_zero.compat.tensors import OpOverload
from lightning_zero.compile.async_compile import DeferredKernels
from lightning_zero.compile.fx_utils import output_node
from lightning_zero.compile.passes.dequantize import expand_dequantized
from lightning_zero.compile.subgraphs.subgraph import NodeSignatures, Subgraph, signature
from lightning_zero.compile.subgraphs.subgraph_program import Compiled, SubgraphProgram, compile_subgraph
from lightning_zero.native.ops import find_op
from lightning_zero.profiling.graph_tensors import is_view, nodes_where, tensors_of


class SubgraphCache:
    """Compiled subgraphs, shared with later graphs, such as those of a new plan or of evaluation.

    Attributes:
        compiled: number of compiled subgraphs.
        found: number of cache hits.
    """

    def __init__(self) -> None:
        self._cache: dict[Hashable, Compiled] = {}
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._count = count()
        self.compiled = self.found = 0

    def number(self, thing: Any) -> int:
        """Return a unique number of an object that no text describes; ids may be reused by later objects."""
        if thing not in self._numbers:
            self._numbers[thing] = next(self._count)
        return self._numbers[thing]

    def get(self, key: Hashable, make: Callable[[], Compiled]) -> Compiled:
        if key in self._cache:
            self.found += 1
        else:
            self._cache[key] = make()
            self.compiled += 1
        return self._cache[key]


def lower_subgraphs(
    module: GraphModule,
    cache: SubgraphCache,
    kernels: DeferredKernels,
    steps: Sequence[Subgraph | Node],
    begins: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> SubgraphProgram:
    """Compile a cut graph and return its program.

    ``begins`` is called with the number of each subgraph, from 1, and with that of all.

    Raises:
        StrideMismatch: subgraphs do not fit together.
    """
    settings = {**settings, "static_input_idxs": ()}
    subgraphs, compiled = [step for step in steps if isinstance(step, Subgraph)], []
    with kernels.defer():
        for number, subgraph in enumerate(subgraphs, 1):
            if begins is not None:
                begins(number, len(subgraphs))
            compiled.append(_compiled(module, subgraph, cache, settings, kernels))
    return SubgraphProgram(module, steps, compiled)


def _compiled(
    module: GraphModule, subgraph: Subgraph, cache: SubgraphCache, settings: dict[str, Any], kernels: DeferredKernels
) -> Compiled:
    def make() -> Compiled:
        # Other subgraphs were compiled for the strides of these results.
        output_node(subgraph.graph).meta[USER_VISIBLE_OUTPUTS] = list(range(len(subgraph.outputs)))
        inputs = [node.meta["val"] for node in subgraph.graph.find_nodes(op="placeholder")]
        expand_dequantized(subgraph.graph)
        compiled = compile_subgraph(GraphModule(module, subgraph.graph), inputs, settings)
        kernels.assign_to(compiled)
        check_strides(compiled, [node.meta.get("val") for node in subgraph.outputs])
        return compiled

    return cache.get(_fingerprint(module, subgraph, settings, cache.number), make)


def _fingerprint(
    module: GraphModule, subgraph: Subgraph, settings: dict[str, Any], number_of: Callable[[Any], int]
) -> Hashable:
    """Return a key that is equal for subgraphs of equal effect and layouts, regardless of names."""
    seen = subgraph.signatures
    names = {node: number for number, node in enumerate([*subgraph.inputs, *subgraph.steps])}
    does: list[Hashable] = [str(sorted((key, settings.get(key)) for key in ("is_backward", "is_inference")))]
    does += [seen.value(node, number_of) for node in subgraph.inputs]
    for node in subgraph.steps:
        called = node.op if node.op != "get_attr" else number_of(attrgetter(str(node.target))(module))
        signature = seen[node] if node.op != "get_attr" else None
        does.append((called, signature, seen.reads(node, names), seen.value(node, number_of)))
    return *does, *(names[node] for node in subgraph.outputs)


_aten = torch.ops.aten


def fix_strides(graph: Graph, inputs: Sequence[Any]) -> None:
    """Record the strides that views, and values computed from them, really have.

    Args:
        graph: its ``meta["val"]`` are fixed in place. A view that cannot be a view any more becomes a reshape.
        inputs: fake tensors, numbers and symbols with their strides.
    """
    changed: set[Node] = set()
    right: set[Hashable] = set()  # views with correct strides; equal layers have equal ones
    seen, views = NodeSignatures(), nodes_where(graph.nodes, is_view)
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        _note(node, value, changed)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem or (changed and not changed.isdisjoint(node.all_input_nodes)):
            if _is_known(node):
                _note(node, _run(node), changed)
        elif node in views and (before := seen[node]) not in right and _is_known(node):
            _note(node, _run(node), changed)
            if signature(node) == before:
                right.add(before)


def check_strides(compiled: Any, outputs: Sequence[Any]) -> None:
    """Raise :class:`StrideMismatch` if results of a compiled subgraph differ from the recorded strides."""
    made = getattr(compiled, "output_strides", None) or [None] * len(outputs)
    for strides, value in zip(made, outputs, strict=True):
        if strides is None or not isinstance(value, Tensor) or 0 in value.shape:
            continue
        noted = [str(stride) for size, stride in zip(value.shape, value.stride(), strict=True) if str(size) != "1"]
        found = [str(stride) for size, stride in zip(value.shape, strides, strict=True) if str(size) != "1"]
        # Symbols may be written differently.
        known = [pair for pair in zip(noted, found, strict=True) if all(stride.isdecimal() for stride in pair)]
        if any(one != other for one, other in known):
            raise StrideMismatch(f"a result has strides {found} instead of {noted}")


class StrideMismatch(Exception):
    """Inductor has chosen an unexpected layout for a subgraph's result."""


def _is_known(node: Node) -> bool:
    """Return True if running the node on fake tensors gives its strides and has no other effect."""
    target = node.target
    if any("val" not in part.meta for part in (node, *node.all_input_nodes)):
        return False
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or (target.namespace not in ("aten", "prims") and not _is_copy(target)):
        return False
    return "unbacked_bindings" not in node.meta and not node.is_impure()


def _is_copy(target: OpOverload) -> bool:
    op = find_op(target)
    return op is not None and op.name in ("offload", "offload_start", "reload", "reload_start")


def _run(node: Node) -> Any:
    target: Any = node.target
    args: Any
    kwargs: Any
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
    if target is operator.getitem and not isinstance(args[0], Tensor):
        return target(*args)
    with torch.no_grad():
        try:
            return target(*args, **kwargs)
        except (RuntimeError, ValueError):
            if target is not _aten.view.default:
                raise
            node.target = _aten.reshape.default
            return _aten.reshape.default(*args, **kwargs)


def _note(node: Node, value: Any, changed: set[Node]) -> None:
    if _strides(node.meta.get("val")) != _strides(value):
        node.meta["val"] = value
        changed.add(node)


def _strides(value: Any) -> str:
    # Comparing symbols would add guards.
    return str(value.stride() if isinstance(value, Tensor) else [tensor.stride() for tensor in tensors_of(value)])
