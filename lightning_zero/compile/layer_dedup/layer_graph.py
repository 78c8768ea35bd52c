"""One layer's forward and backward as nodes, traced by itself with what traces whole graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.compiler import TracingContext, functorch_config, keep_python_scalars, tracing
from lightning_zero.compat.graphs import CUSTOM, EXAMPLE_VALUE, AC_GRAPH_ID, PARTITIONER_TAG, TANGENTS
from lightning_zero.compat.tensors import FakeTensorMode
from lightning_zero.compile.frontend import storage_key
from lightning_zero.compile.graph import is_op, results
from lightning_zero.compile.layer_dedup.find_layers import LayerMatch
from lightning_zero.compile.layer_dedup.hop_bodies import hop_body, is_region
from lightning_zero.compile.layer_dedup.layer_call import DedupFailed, end
from lightning_zero.compile.layer_dedup.node_template import PLACE, WITHIN, NodeTemplate
from lightning_zero.compile.layer_dedup.region_ids import in_region
from lightning_zero.compile.layer_dedup.trace_layers import TraceJoint

__all__ = ["LayerGraph", "fake_mode", "trace_layer"]


@dataclass(frozen=True)
class LayerGraph:
    """A layer's joint graph.

    Attributes:
        given, tangents: its inputs.
        forward, backward: its work, in order.
        results: what forward returns.
        grads: what backward returns of each that was given.
        constants: tensors that the layer makes of numbers in its code, by the attribute that nodes of the work read.
        numbers: of the checkpointed regions in it.
        passed: the same after the backend's passes over joint graphs; None where it has none, or where these have to
            see the whole graph.
    """

    given: tuple[Node, ...]
    tangents: tuple[Node, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    results: tuple[Node, ...]
    grads: tuple[Node | None, ...]
    constants: Mapping[str, Tensor]
    numbers: frozenset[int]
    passed: LayerGraph | None = None

    @cached_property
    def notes(self) -> dict[Node, NodeTemplate]:
        """On its work."""
        return {node: NodeTemplate.of(node) for node in (*self.forward, *self.backward)}


def fake_mode() -> FakeTensorMode:
    """That of the graph that is being compiled."""
    context = TracingContext.try_get()
    assert context is not None, "a graph is being compiled"
    assert context.fake_mode is not None, "what is compiled is traced"
    return context.fake_mode


def trace_layer(region: LayerMatch, trace: TraceJoint, strides: Sequence[Sequence[int]] | None = None) -> LayerGraph:
    """The joint graph of a region.

    Args:
        region: of Dynamo's graph.
        trace: what makes a joint graph.
        strides: of the gradients of its results; None for those that the results have.

    Raises:
        DedupFailed: it does more than give results and gradients.
    """
    module, inputs = _alone(region, strides)
    with _by_itself():
        joint = trace(module, inputs)
        body = _split(joint.traced, region)
        return body if joint.passed is None else replace(body, passed=_after_passes(body, joint.passed, region))


def _after_passes(body: LayerGraph, graph: Graph, region: LayerMatch) -> LayerGraph | None:
    """None where the rest of the graph would not find what it was traced with: results in another layout (products that
    are padded), or in memory of others."""
    try:
        passed = _split(graph, region)
    except DedupFailed:
        return None
    layouts = [[_form(node) for node in (*it.results, *it.grads)] for it in (body, passed)]
    memory = [storage_key(node.meta["val"]) for node in (*passed.given, *passed.tangents, *passed.results)]
    given = len(passed.given) + len(passed.tangents)
    apart = len({*memory[given:]} - {*memory[:given]}) == len(passed.results)
    return passed if apart and layouts[0] == layouts[1] else None


def _form(node: Node | None) -> Any:
    value = None if node is None else node.meta.get("val")
    return (value.dtype, value.shape, value.stride(), value.device) if isinstance(value, Tensor) else None


def _alone(region: LayerMatch, strides: Sequence[Sequence[int]] | None) -> tuple[GraphModule, list[Tensor]]:
    graph, new = Graph(), {}
    for node in region.given:
        new[node] = graph.placeholder(node.name)
    bodies: dict[str, Any] = {}
    places = {node: place for place, node in enumerate(region.places)}
    for node in region.nodes:
        for read in node.all_input_nodes:
            if read not in new and hop_body(read) is not None:
                bodies[str(read.target)] = _placed(read, places)
                new[read] = graph.create_node("get_attr", read.target)
        new[node] = graph.node_copy(node, new.__getitem__)
        _note(new[node], PLACE, places[node])
    returned = [new[node] for node in region.results]
    if strides is not None:
        returned = [graph.call_function(end(), pair) for pair in zip(returned, strides, strict=True)]
    graph.output(tuple(returned))
    with fake_mode():
        inputs = [_like(node.meta[EXAMPLE_VALUE]) for node in region.given]
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta[EXAMPLE_VALUE] = value
    return GraphModule(bodies, graph), inputs


def _placed(called: Node, places: Mapping[Node, int]) -> GraphModule:
    """A copy of a graph that a layer calls, whose nodes say where they stand in it: of a function, at the call."""
    body, caller = hop_body(called), next(iter(called.users))
    assert body is not None
    graph, copies, bodies = Graph(), dict[Node, Any](), dict[str, Any]()
    graph.output(graph.graph_copy(body.graph, copies))
    for node, copy in copies.items():
        if is_region(called):
            _note(copy, PLACE, places[node])
        else:
            _note(copy, WITHIN, places[caller])
        if hop_body(node) is not None:
            bodies[str(node.target)] = _placed(node, places)
    module = GraphModule(bodies, graph)
    module.meta |= body.meta  # what users choose to save of a region
    return module


def _note(node: Node, key: str, place: int) -> None:
    node.meta[CUSTOM] = {**node.meta.get(CUSTOM, {}), key: place}


def _like(value: Tensor) -> Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


@contextmanager
def _by_itself() -> Iterator[None]:
    """What is noted while a graph is traced is not noted of the layer. What it is given is a leaf here and is none in
    the whole graph, and autocast casts leaves once."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with (
            tracing(TracingContext(fake_mode())),
            functorch_config.patch(enable_autograd_cache=False),
            # Or a layer would be refused for a number that the rest of the graph is given as an input.
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
    if len(given) != len(region.given) or len(tangents) != count or len(returned) != count + len(given):
        raise DedupFailed("a layer edits what it is given, or returns what needs no gradient")
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
    # What a user's function computes in its backward without any gradient is noted as being on neither side.
    if early or any(map(_in_forward, backward)) or not all(node in first for node in returned[:count]):
        raise DedupFailed("a layer's forward and backward are entangled")
    constants = {str(node.target): _constant(graph, node) for node in work if node.op == "get_attr"}
    results_, grads = tuple(returned[:count]), tuple(returned[count:])
    numbers = frozenset(node.meta[AC_GRAPH_ID] for node in work if in_region(node))
    return LayerGraph(tuple(given), tuple(tangents), tuple(forward), tuple(backward), results_, grads, constants, numbers)


def _constant(graph: Graph, node: Node) -> Any:
    return getattr(graph.owning_module, str(node.target), None)


def _in_forward(node: Node) -> bool:
    return str(node.meta.get(PARTITIONER_TAG)).endswith("forward")


def _in_backward(node: Node) -> bool:
    return str(node.meta.get(PARTITIONER_TAG)).endswith("backward")  # it is, or it has to be
