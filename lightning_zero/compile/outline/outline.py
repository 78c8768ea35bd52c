"""Puts standins into Dynamo's graph, and layers in their place again."""

from __future__ import annotations

import logging
import operator
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.graphs import EXAMPLE
from lightning_zero.compile.graph import results
from lightning_zero.compile.outline.alike import digest_of
from lightning_zero.compile.outline.body import Body, TraceJoint, fake_mode, trace_body
from lightning_zero.compile.outline.find import LEAST_REPETITIONS, Region, find_regions
from lightning_zero.compile.outline.inline import Inlined
from lightning_zero.compile.outline.standin import backward, describe, forward

__all__ = ["Outline", "outline"]

log = logging.getLogger(__name__)


class Outline:
    """The layers of one graph that were taken out of it.

    Args:
        module: Dynamo's, whose graph holds standins in their place.
        before: the graph without standins.
        layers: regions of ``before``, with the body of each.
    """

    def __init__(self, module: GraphModule, before: Graph, layers: list[tuple[Region, Body]]) -> None:
        self._module = module
        self._before = before
        self._layers = layers
        self._fake_mode = fake_mode()

    def undo(self) -> None:
        """Dynamo's graph is as it was."""
        self._module.graph = self._before

    def inline(self, graph: Graph) -> Graph:
        """Puts the layers into a joint graph, in place of their standins."""
        begun: dict[int, Inlined] = {}
        with self._fake_mode:
            for node in list(graph.nodes):
                if node.target is forward():
                    number = node.args[1]
                    begun[number] = Inlined(graph, *self._layers[number])
                    begun[number].forward(node)
                elif node.target is backward():
                    begun[node.args[1]].backward(node)
        return graph


def outline(module: GraphModule, trace: TraceJoint) -> Outline | None:
    """Puts a standin in the place of each layer that occurs often enough; None where nothing was changed."""
    if not torch.is_grad_enabled() or not _needs_grad(module.graph):
        return None
    regions = [(region, digest_of(region)) for region in find_regions(module.graph, True) if _cast_alike(region)]
    often = {digest for digest, count in Counter(digest for _, digest in regions).items() if count >= LEAST_REPETITIONS}
    bodies: dict[str, Body] = {}
    layers: list[tuple[Region, Body]] = []
    before = module.graph
    for region, digest in regions:
        if digest is None or digest not in often:
            continue
        if digest not in bodies:
            try:
                bodies[digest] = trace_body(region, trace)
            except Exception as error:  # whatever it is, the whole graph may well be traced without it
                log.info("Layers that are alike are each traced: %s", error)
                often.discard(digest)
                continue
        layers.append((region, bodies[digest]))
    if not layers:
        return None
    digests = {id(body): digest for digest, body in bodies.items()}
    module.graph = _with_standins(before, layers, digests)
    log.info("%d layers of %d kinds are traced once", len(layers), len(bodies))
    return Outline(module, before, layers)


def _needs_grad(graph: Graph) -> bool:
    values = [node.meta.get(EXAMPLE) for node in results(graph) if isinstance(node, Node)]
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _cast_alike(region: Region) -> bool:
    """Autocast casts an input of the graph that needs a gradient once in all of it, which a layer cannot."""
    own = set(region.nodes)
    inputs = [node for node in region.given if node.op == "placeholder" and node.meta[EXAMPLE].requires_grad]
    readers = [user.target for node in inputs for user in node.users if user in own]
    return all(getattr(target, "overloadpacket", target) is torch.ops.lightning_zero.gather for target in readers)


def _with_standins(before: Graph, layers: list[tuple[Region, Body]], digests: dict[int, str]) -> Graph:
    after = Graph()
    new: dict[Node, Any] = {}
    last = {region.nodes[-1]: number for number, (region, _) in enumerate(layers)}
    inside = {node for region, _ in layers for node in region.nodes}
    for node in before.nodes:
        if node not in inside:
            new[node] = copy = after.node_copy(node, new.__getitem__)
            # Dynamo notes where an input comes from in an attribute of the node.
            vars(copy).update({name: value for name, value in vars(node).items() if name not in vars(copy)})
        elif node in last:
            number = last[node]
            region, body = layers[number]
            given = [new[read] for read in region.given]
            layouts = describe(_values(body.results)), describe(_values(body.grads))
            standin = after.call_function(forward(), (digests[id(body)], number, *layouts, given))
            standin.meta[EXAMPLE] = [result.meta[EXAMPLE] for result in region.results]
            for at, result in enumerate(region.results):
                new[result] = after.call_function(operator.getitem, (standin, at))
                new[result].meta = dict(result.meta)
    return after


def _values(nodes: tuple[Node | None, ...]) -> list[Tensor | None]:
    return [None if node is None else node.meta["val"] for node in nodes]
