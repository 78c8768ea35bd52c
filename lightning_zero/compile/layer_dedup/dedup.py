"""Replace equal layers of Dynamo's graph by layer calls, and expand them in the joint graph."""

from __future__ import annotations

import logging
import operator
import secrets
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.graphs import AC_GRAPH_ID, EXAMPLE_VALUE
from lightning_zero.compat.tensors import CHECKPOINTS, no_dispatch_modes, no_python_dispatcher
from lightning_zero.compile.events import OPTIMIZATION_COUNTS
from lightning_zero.compile.fx_utils import GATHER, NodeReplacer, results
from lightning_zero.compile.layer_dedup.expand import ComputedNumbers, LayerExpansion, rebase_value
from lightning_zero.compile.layer_dedup.hop_bodies import bypass_region_inputs, expand_regions, has_own_policy, readers
from lightning_zero.compile.layer_dedup.layer_call import TANGENTS, TENSORS, DedupFailed, backward, describe, forward
from lightning_zero.compile.layer_dedup.layer_graph import LayerGraph, RegionIds, TraceJoint, in_region, trace_layer
from lightning_zero.compile.layer_dedup.matching import (
    MIN_REPETITIONS,
    LayerMatch,
    NodeFingerprints,
    find_layers,
    find_undescribed,
)
from lightning_zero.native.ops import NAMESPACE

log = logging.getLogger(__name__)


# Smallest share of nodes to deduplicate. Below it (a Swin, where only attention's projections repeat) mismatches, each
# of which costs a trace of the whole graph, outweigh the gain.
MIN_SAVED_SHARE = 0.1
MAX_TRACES = 3  # of a whole graph with layer calls


@dataclass(frozen=True)
class _Layer:
    region: LayerMatch
    digest: str
    body: LayerGraph


class LayerDedup:
    """A graph whose layers are replaced by layer calls.

    Args:
        mismatched_kinds: digests of layers that failed to expand in earlier attempts.
    """

    def __init__(
        self, module: GraphModule, layers: Sequence[_Layer], trace: TraceJoint, mismatched_kinds: tuple[str, ...] = ()
    ) -> None:
        self._module = module
        self._trace = trace
        self._mismatched_kinds = mismatched_kinds
        self._before = module.graph
        self._layers = layers
        self._passed = False
        module.graph = _insert_layer_calls(self._before, layers)

    def __len__(self) -> int:
        return len(self._layers)

    def without(self, error: DedupFailed) -> LayerDedup | None:
        """Restore the graph and return what can still be deduplicated; None for nothing.

        If output gradients have other strides than outputs (channels-last convolutions), this layer and equal ones
        before it are traced for these strides. Otherwise the layer is left out. A second failure of one kind drops the
        kind, and a third failure drops everything, because each costs a trace of the whole graph.
        """
        self._module.graph = self._before
        if not 0 <= error.number < len(self._layers) or len(self._mismatched_kinds) + 1 >= MAX_TRACES:
            return None  # without a layer to blame, drop all
        kind = self._layers[error.number].digest
        left = self._without(error.number, kind, error.strides)
        return LayerDedup(self._module, left, self._trace, (*self._mismatched_kinds, kind)) if len(left) > 1 else None

    def _without(self, number: int, kind: str, strides: list[list[int]] | None) -> list[_Layer]:
        body = None if strides is None else _try_trace_layer(self._layers[number].region, self._trace, strides)
        if body is not None:  # later layers matched: backward begins with the last
            own = [at <= number and layer.digest == kind for at, layer in enumerate(self._layers)]
            return [replace(layer, body=body) if it else layer for it, layer in zip(own, self._layers, strict=True)]
        if kind in self._mismatched_kinds:
            return [layer for layer in self._layers if layer.digest != kind]
        return [layer for at, layer in enumerate(self._layers) if at != number]

    def passes_done(self, graph: Graph) -> bool:
        """Return True if Inductor's joint-graph passes may run on layer calls before :meth:`expand`.

        They have already run on one layer of each kind. It is False if a layer's input depends on no graph input (a
        mask of zeros), because the passes know more about such a value than about an input of the layer.
        """
        fixed: set[Node] = set()
        given: list[Node] = []
        for node in graph.nodes:
            if node.target is forward() or node.target is backward():
                tensors = node.args[TENSORS if node.target is forward() else TANGENTS]
                assert isinstance(tensors, Sequence)
                given += [read for read in tensors if isinstance(read, Node)]
            elif isinstance(node.meta.get("val"), SymInt) or (
                node.op == "call_function" and fixed.issuperset(node.all_input_nodes)
            ):
                fixed.add(node)
        known = all(layer.body.passed is not None for layer in self._layers)
        self._passed = known and fixed.isdisjoint(given)
        return self._passed

    def expand(self, graph: Graph) -> Graph:
        """Expand the layers in a joint graph, after Inductor's passes if :meth:`passes_done`.

        Raises:
            DedupFailed: a layer does not match its trace.
        """
        try:
            with no_dispatch_modes(), no_python_dispatcher():  # fake values are created on purpose
                self._expand(graph)
        except DedupFailed:
            raise
        except Exception as error:  # the graph may well compile without layer calls
            raise DedupFailed(f"{type(error).__name__}: {error}") from error
        return graph

    def _expand(self, graph: Graph) -> None:
        begun: dict[int, LayerExpansion] = {}
        moved: dict[int, Tensor] = {}
        numbers = RegionIds()
        layer_calls, computed = NodeReplacer(graph), ComputedNumbers()
        parts: set[Node] = set()  # items of layer calls' results
        for node in list(graph.nodes):
            if node in parts:
                continue
            computed.add(node)
            if node.target is forward() or node.target is backward():
                parts.update(node.users)
            if node.target is forward():
                number = node.args[1]
                layer = self._layers[number]
                body = layer.body.passed if self._passed else layer.body
                assert body is not None
                begun[number] = LayerExpansion(
                    graph, layer_calls, number, layer.region, body, numbers.of_layer(body.numbers), computed
                )
                begun[number].forward(node)
                moved |= begun[number].moved
                continue
            if node.target is backward():
                begun[node.args[1]].backward(node)
                moved |= begun[node.args[1]].moved
                continue
            if in_region(node):
                node.meta[AC_GRAPH_ID] = numbers.of(node.meta[AC_GRAPH_ID])
            if "val" in node.meta:
                node.meta["val"] = rebase_value(node.meta["val"], moved)
        layer_calls.done()


def dedup_layers(module: GraphModule, trace: TraceJoint) -> LayerDedup | None:
    """Replace repeated layers by layer calls; return None if nothing was changed."""
    if not torch.is_grad_enabled() or not _needs_grad(module.graph):
        return None
    bypass_region_inputs(module.graph)
    once = secrets.token_hex(8)
    fingerprints = NodeFingerprints()
    regions = [
        (r, _digest(r, fingerprints, once)) for r in find_layers(module.graph, True, fingerprints) if _casts_equally(r)
    ]
    counts = Counter(digest for _, digest in regions)
    bodies: dict[str, LayerGraph | None] = {}
    layers: list[_Layer] = []
    for region, digest in regions:
        if digest is None or counts[digest] < MIN_REPETITIONS:
            continue
        if digest not in bodies:
            bodies[digest] = _try_trace_layer(region, trace)
        if (body := bodies[digest]) is not None and _sums_in_same_order(region, body):
            layers.append(_Layer(region, digest, body))
    if log.isEnabledFor(logging.DEBUG):
        for match in [match for match, digest in regions if digest is None]:
            call = find_undescribed(match.places)
            log.debug("Layer deduplication: layer at %s is traced alone (%s cannot be described)", match.nodes[0], call)
        log_unmatched_regions(module.graph, {node for layer in layers for node in layer.region.nodes})
    kinds = {layer.digest: len(layer.region.places) for layer in layers}
    spared = sum(len(layer.region.places) for layer in layers) - sum(kinds.values())
    if not layers or spared < MIN_SAVED_SHARE * len(expand_regions(module.graph.nodes)):
        return None
    log.debug("Layer deduplication: %d layers are differentiated as %d", len(layers), len(kinds))
    OPTIMIZATION_COUNTS["layers"] += len(layers)
    OPTIMIZATION_COUNTS["layers differentiated"] += len(kinds)
    return LayerDedup(module, layers, trace)


def _digest(region: LayerMatch, fingerprints: NodeFingerprints, once: str) -> str | None:
    """Return the layer's digest, unique to this process if users choose saved values by code of their own."""
    digest = fingerprints.layer_digest(region)
    return f"{digest} {once}" if digest is not None and has_own_policy(region.places) else digest


def _sums_in_same_order(region: LayerMatch, body: LayerGraph) -> bool:
    """Return True if gradients are summed in the same order as in the whole graph.

    A gradient with summands from the layer and from elsewhere (all T5 decoder layers read the encoder's output) would
    be summed in another order, and last bits would differ.
    """
    own = set(region.nodes)
    shared = [any(user not in own for user in node.users) for node in region.inputs]
    sums = [grad is not None and grad.target is torch.ops.aten.add.Tensor for grad in body.grads]
    return not any(here and there for here, there in zip(sums, shared, strict=True))


def _try_trace_layer(
    region: LayerMatch, trace: TraceJoint, strides: list[list[int]] | None = None
) -> LayerGraph | None:
    try:
        return trace_layer(region, trace, strides)
    except Exception as error:  # the graph may well be traced without it
        log.debug("Layer deduplication: skipped a kind of layer (reason=%s)", error)
        return None


def _needs_grad(graph: Graph) -> bool:
    values = [node.meta.get(EXAMPLE_VALUE) for node in results(graph) if isinstance(node, Node)]
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _casts_equally(region: LayerMatch) -> bool:
    """Return True if autocast casts no graph input that requires grad inside the layer.

    Autocast casts such an input once per graph, which a layer cannot reproduce.
    """
    values = [node.meta[EXAMPLE_VALUE] for node in region.tensors]
    if not any(torch.is_autocast_enabled(value.device.type) for value in values):
        return True
    own = set(region.nodes)
    inputs = [node for node in region.tensors if node.op == "placeholder" and node.meta[EXAMPLE_VALUE].requires_grad]
    targets = [read.target for node in inputs for read in readers(node, own.intersection(node.users))]
    return all(str(getattr(target, "overloadpacket", target)) == f"{NAMESPACE}.{GATHER}" for target in targets)


def _insert_layer_calls(before: Graph, layers: Sequence[_Layer]) -> Graph:
    after = Graph()
    new: dict[Node, Any] = {}
    ends = {layer.region.nodes[-1]: number for number, layer in enumerate(layers)}
    inside = {node for layer in layers for node in layer.region.nodes}
    for node in before.nodes:
        if node.op == "get_attr" and inside.issuperset(node.users):
            continue  # graphs of functions that layers call
        if node not in inside:
            new[node] = copy = after.node_copy(node, new.__getitem__)
            # Dynamo stores an input's source in an attribute of the node.
            vars(copy).update({name: value for name, value in vars(node).items() if name not in vars(copy)})
        elif node in ends:
            number = ends[node]
            region, body = layers[number].region, layers[number].body
            layouts = describe(_values(body.results)), describe(_values(body.grads[len(region.sizes) :]))
            inputs = [[new[read] for read in reads] for reads in (region.tensors, region.sizes)]
            arguments: Any = (layers[number].digest, number, *layouts, *inputs)
            call = after.call_function(forward(), arguments)
            call.meta[EXAMPLE_VALUE] = [result.meta[EXAMPLE_VALUE] for result in region.results]
            for at, result in enumerate(region.results):
                new[result] = after.call_function(operator.getitem, (call, at))
                new[result].meta = dict(result.meta)
    return after


def _values(nodes: tuple[Node | None, ...]) -> list[Tensor | None]:
    return [None if node is None else node.meta["val"] for node in nodes]


def log_unmatched_regions(graph: Graph, inside: AbstractSet[Node]) -> None:
    """Log at DEBUG why checkpointed regions outside of ``inside`` are not deduplicated."""
    for node in graph.nodes:
        if node.target not in CHECKPOINTS or node in inside:
            continue
        call = find_undescribed(reversed(expand_regions([node])))
        why = "too few equal regions, or they share values"
        if call is not None:
            why = f"{call} cannot be described"
        log.debug("Layer deduplication: checkpointed region %s is traced alone (%s)", node, why)
