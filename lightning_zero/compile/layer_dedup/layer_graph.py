"""Trace the forward and backward of one layer, with the tracer of whole graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from functorch.compile import config as functorch_config
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.compiler import (
    CustomGraphPass,
    TracingContext,
    aot_autograd,
    inductor_config,
    keep_python_scalars,
    lookup_backend,
    stable_topological_sort,
    tracing,
)
from lightning_zero.compat.graphs import (
    AC_GRAPH_ID,
    CUSTOM,
    EXAMPLE_VALUE,
    FWD_NN_MODULE_STACK,
    FWD_SOURCE_FN_STACK,
    NN_MODULE_STACK,
    PARTITIONER_TAG,
    SOURCE_FN_STACK,
    TANGENTS,
)
from lightning_zero.compat.tensors import FakeTensor, FakeTensorMode, layout_key, storage_key
from lightning_zero.compile.fx_utils import is_op, results
from lightning_zero.compile.layer_dedup.hop_bodies import hop_body, is_region
from lightning_zero.compile.layer_dedup.layer_call import DedupFailed, end
from lightning_zero.compile.layer_dedup.matching import LayerMatch


@dataclass(frozen=True)
class LayerGraph:
    """Joint graph of a layer.

    Attributes:
        forward, backward: its nodes, in order.
        grads: outputs of backward, one per element of ``inputs``.
        constants: tensors made from numbers in the code, by attribute name.
        numbers: ids of checkpointed regions in it.
        passed: the layer after the backend's joint-graph passes; None if there are none or if they need the whole
            graph.
    """

    inputs: tuple[Node, ...]
    tangents: tuple[Node, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    results: tuple[Node, ...]
    grads: tuple[Node | None, ...]
    constants: Mapping[str, Tensor]
    numbers: frozenset[int]
    passed: LayerGraph | None = None

    @cached_property
    def templates(self) -> dict[Node, NodeTemplate]:
        return {node: NodeTemplate.of(node) for node in (*self.forward, *self.backward)}


def fake_mode() -> FakeTensorMode:
    """Return the fake mode of the graph that is being compiled."""
    context = TracingContext.try_get()
    assert context is not None, "a graph is being compiled"
    assert context.fake_mode is not None, "what is compiled is traced"
    return context.fake_mode


def trace_layer(region: LayerMatch, trace: TraceJoint, strides: Sequence[Sequence[int]] | None = None) -> LayerGraph:
    """Trace the joint graph of a layer.

    Args:
        strides: of the results' gradients; None for the strides of the results.

    Raises:
        DedupFailed: the layer does more than return results and gradients.
    """
    module, inputs = _extract_module(region, strides)
    with _separate_tracing():
        joint = trace(module, inputs)
        body = _split(joint.traced, region)
        return body if joint.passed is None else replace(body, passed=_after_passes(body, joint.passed, region))


def _after_passes(body: LayerGraph, graph: Graph, region: LayerMatch) -> LayerGraph | None:
    """Return None if the passes changed layouts (padded products) or aliasing of results."""
    try:
        passed = _split(graph, region)
    except DedupFailed:
        return None
    layouts = [[_layout(node) for node in (*it.results, *it.grads)] for it in (body, passed)]
    tensors = passed.inputs[len(region.sizes) :]
    memory = [storage_key(node.meta["val"]) for node in (*tensors, *passed.tangents, *passed.results)]
    given = len(tensors) + len(passed.tangents)
    apart = len({*memory[given:]} - {*memory[:given]}) == len(passed.results)
    return passed if apart and layouts[0] == layouts[1] else None


def _layout(node: Node | None) -> Any:
    value = None if node is None else node.meta.get("val")
    return layout_key(value) if isinstance(value, Tensor) else None


def _extract_module(region: LayerMatch, strides: Sequence[Sequence[int]] | None) -> tuple[GraphModule, list[Any]]:
    graph, new = Graph(), {}
    for node in region.inputs:
        new[node] = graph.placeholder(node.name)
    bodies: dict[str, Any] = {}
    places = {node: place for place, node in enumerate(region.places)}
    for node in region.numbers:
        new[node] = graph.node_copy(node, new.__getitem__)
    for node in region.nodes:
        for read in node.all_input_nodes:
            if read not in new and hop_body(read) is not None:
                bodies[str(read.target)] = _with_places(read, places)
                new[read] = graph.create_node("get_attr", read.target)
        new[node] = graph.node_copy(node, new.__getitem__)
        _set_place(new[node], PLACE, places[node])
    returned = [new[node] for node in region.results]
    if strides is not None:
        returned = [graph.call_function(end(), pair) for pair in zip(returned, strides, strict=True)]
    graph.output(tuple(returned))
    with fake_mode():
        inputs = [_fake_leaf(node.meta[EXAMPLE_VALUE]) for node in region.inputs]
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta[EXAMPLE_VALUE] = value
    return GraphModule(bodies, graph), inputs


def _with_places(called: Node, places: Mapping[Node, int]) -> GraphModule:
    """Return a copy of a called graph whose nodes store their position in the layer, or that of the call."""
    body, caller = hop_body(called), next(iter(called.users))
    assert body is not None
    graph, copies, bodies = Graph(), dict[Node, Any](), dict[str, Any]()
    graph.output(graph.graph_copy(body.graph, copies))
    for node, copy in copies.items():
        if is_region(called):
            _set_place(copy, PLACE, places[node])
        else:
            _set_place(copy, WITHIN, places[caller])
        if hop_body(node) is not None:
            bodies[str(node.target)] = _with_places(node, places)
    module = GraphModule(bodies, graph)
    module.meta |= body.meta  # the region's save policy
    return module


def _set_place(node: Node, key: str, place: int) -> None:
    node.meta[CUSTOM] = {**node.meta.get(CUSTOM, {}), key: place}


def _fake_leaf(value: Tensor | SymInt) -> Tensor | SymInt:
    if isinstance(value, SymInt):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


@contextmanager
def _separate_tracing() -> Iterator[None]:
    """Return a context for tracing a layer alone.

    Metadata of the trace must not be recorded for the layer. Inputs are leaves here but not in the whole graph, and
    autocast casts leaves once.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with (
            tracing(TracingContext(fake_mode())),
            functorch_config.patch(enable_autograd_cache=False),
            # Otherwise a number that the rest of the graph gets as an input would fail the layer.
            keep_python_scalars(),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _split(graph: Graph, region: LayerMatch) -> LayerGraph:
    inputs = graph.find_nodes(op="placeholder")
    given = [node for node in inputs if not node.name.startswith(TANGENTS)]
    tangents = inputs[len(given) :]
    returned: list[Any] = [
        node.args[0] if isinstance(node, Node) and node.target is end() else node for node in results(graph)
    ]
    count = len(region.results)
    if len(given) != len(region.inputs) or len(tangents) != count or len(returned) != count + len(given):
        raise DedupFailed("a layer mutates an input, or returns a value that needs no gradient")
    work = [node for node in graph.nodes if node.op not in ("placeholder", "output") and node.target is not end()]
    for node in work:
        if node.op == "get_attr" and isinstance(_constant(graph, node), Tensor):
            continue
        if node.op != "call_function" or (is_op(node) and node.target._schema.is_mutable):
            raise DedupFailed(f"a layer calls {node.target}")
    begin = next((at for at, node in enumerate(work) if _in_backward(node)), len(work))
    forward, backward = work[:begin], work[begin:]
    first = set(forward)
    early = any(read in tangents for node in forward for read in node.all_input_nodes)
    # Backward nodes of user functions that depend on no gradient are marked as neither side.
    if early or any(map(_in_forward, backward)) or not all(node in first for node in returned[:count]):
        raise DedupFailed("a layer's forward and backward are entangled")
    constants = {str(node.target): _constant(graph, node) for node in work if node.op == "get_attr"}
    results_, grads = tuple(returned[:count]), tuple(returned[count:])
    numbers = frozenset(node.meta[AC_GRAPH_ID] for node in work if in_region(node))
    return LayerGraph(
        tuple(given), tuple(tangents), tuple(forward), tuple(backward), results_, grads, constants, numbers
    )


def _constant(graph: Graph, node: Node) -> Any:
    return getattr(graph.owning_module, str(node.target), None)


def _in_forward(node: Node) -> bool:
    return str(node.meta.get(PARTITIONER_TAG)).endswith("forward")


def _in_backward(node: Node) -> bool:
    return str(node.meta.get(PARTITIONER_TAG)).endswith("backward")  # the value or the string


@dataclass(frozen=True)
class JointGraph:
    """A joint graph.

    Attributes:
        passed: after the backend's joint-graph passes except the one that seeds random numbers; None if there are none.
    """

    traced: Graph
    passed: Graph | None = None


# Makes the joint graph of a module.
TraceJoint = Callable[[GraphModule, Sequence[Any]], JointGraph]


def joint_tracer(backend: str) -> TraceJoint:
    """Return the tracer of "aot_eager" or of Inductor, which has its own decompositions."""
    return partial(_trace, _trace_aot_eager if backend == "aot_eager" else _trace_inductor)


class _JointGraphFound(Exception):
    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint


def _trace(compile_with: Callable[..., Any], module: GraphModule, inputs: Sequence[Any]) -> JointGraph:
    try:
        compile_with(module, inputs)
    except _JointGraphFound as found:
        return found.joint
    raise DedupFailed("a layer needs no backward")


def _trace_aot_eager(module: GraphModule, inputs: Sequence[Any]) -> None:
    def partition(module: GraphModule, *args: Any, **settings: Any) -> NoReturn:
        raise _JointGraphFound(JointGraph(module.graph))

    def compiler(module: GraphModule, inputs: Any) -> Any:
        return module

    aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(module, inputs)


def _trace_inductor(module: GraphModule, inputs: Sequence[Any]) -> None:
    compile_fx: Any = lookup_backend("inductor")
    with ExitStack() as until_taken:
        keep = _KeepGraph(until_taken)
        patches = {"joint_custom_pre_pass": keep, "joint_custom_post_pass": _StopAfterPasses(keep)}
        compile_fx(module, inputs, config_patches=patches)


class _KeepGraph(CustomGraphPass):
    graph: Graph

    def __init__(self, until_taken: ExitStack) -> None:
        self._until_taken = until_taken

    def __call__(self, graph: Graph) -> None:
        # Seeds are drawn for a whole graph at once.
        self._until_taken.enter_context(inductor_config.patch(fallback_random=True))
        self.graph = Graph(graph.owning_module)
        self.graph.output(self.graph.graph_copy(graph, {}))

    def uuid(self) -> None:
        return None


class _StopAfterPasses(CustomGraphPass):
    def __init__(self, kept: _KeepGraph) -> None:
        self._kept = kept

    def __call__(self, graph: Graph) -> NoReturn:
        stable_topological_sort(graph)  # Inductor sorts after all of its passes
        raise _JointGraphFound(JointGraph(self._kept.graph, graph))

    def uuid(self) -> None:
        return None


PLACE = "lightning_zero.place"  # key in node.meta[CUSTOM]: position of the original node in the layer
WITHIN = "lightning_zero.within"  # key: position of the call of a function that contains the node

_NUMBER = re.compile(r"_\d+$")

# Metadata of source modules, by the key under which Dynamo's graph has it.
ORIGINS = {
    NN_MODULE_STACK: NN_MODULE_STACK,
    SOURCE_FN_STACK: SOURCE_FN_STACK,
    FWD_NN_MODULE_STACK: NN_MODULE_STACK,
    FWD_SOURCE_FN_STACK: SOURCE_FN_STACK,
}


@dataclass(frozen=True)
class View:
    """Layout of a fake tensor in its storage, in elements."""

    value: FakeTensor
    memory: int
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int | SymInt

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return views of a value or of a tuple's items; other values are returned unchanged."""
        if isinstance(value, tuple | list):
            return type(value)(map(cls.of, value))
        if not isinstance(value, FakeTensor):
            return value
        return cls(value, storage_key(value), value.shape, value.stride(), value.storage_offset())


@dataclass(frozen=True)
class NodeTemplate:
    """Properties of one node that all layers of a kind share.

    Attributes:
        name: without its number, since torch 2.11 would search for a free number among all layers.
        meta: metadata, except what the other attributes override.
        view: value as a view of the layer's memory.
        region: id of its checkpointed region.
        place: position in the layer of the node in Dynamo's graph.
        within: position of the call of the function that contains it.
        origins: pairs of metadata keys here and in Dynamo's graph.
    """

    name: str
    meta: dict[str, Any]
    view: Any
    region: int | None
    place: int | None
    within: int | None
    origins: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, node: Node) -> NodeTemplate:
        meta = dict(node.meta)
        view = View.of(meta.get("val"))
        region = meta.pop(AC_GRAPH_ID) if in_region(node) else None
        custom = dict(meta.pop(CUSTOM, {}))
        place, within = custom.pop(PLACE, None), custom.pop(WITHIN, None)
        if within is not None:
            origins = [(key, NN_MODULE_STACK) for key in (NN_MODULE_STACK, FWD_NN_MODULE_STACK) if key in meta]
        elif place is not None:
            origins, custom = [(key, origin) for key, origin in ORIGINS.items() if key in meta], {}
        else:
            origins = []
        if custom:
            meta[CUSTOM] = custom
        return cls(_NUMBER.sub("", node.name), meta, view, region, place, within, origins)


_FIRST = 2  # nodes outside of regions get 1


def in_region(node: Node) -> bool:
    return node.meta.get(AC_GRAPH_ID) is not None  # torch may store None


class RegionIds:
    """Assign increasing ids to checkpointed regions in graph order, as if each layer had been traced.

    The partitioner saves values that pass into regions of larger ids.
    """

    def __init__(self) -> None:
        self._last = _FIRST - 1
        self._shift = 0
        self._ids: dict[int, int] = {}

    def of(self, number: int) -> int:
        """Return the id of a region traced with the graph."""
        if number not in self._ids:
            self._ids[number] = number + self._shift
            self._last = max(self._last, number + self._shift)
        return self._ids[number]

    def of_layer(self, numbers: Sequence[int]) -> dict[int, int]:
        """Return ids of the regions of a layer that was traced alone."""
        own = {number: self._last + at for at, number in enumerate(sorted(numbers), 1)}
        self._last += len(own)
        self._shift += len(own)
        return own
