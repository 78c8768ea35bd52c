"""Finds the parts of Dynamo's graph that are equal, as the layers of a model are, and can be traced by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from lightning_zero.compat.graphs import ENTER_CALLS, EXIT_CALLS, EXAMPLE_VALUE, SET_GRAD_ENABLED, NO_OP_CALLS, STATELESS_CALLS
from lightning_zero.compat.ops import CHECKPOINTS
from lightning_zero.compile.draws import ForbidRandomOps
from lightning_zero.compile.frontend import node_storage, mutated_inputs
from lightning_zero.compile.layer_dedup.hop_bodies import hop_body, expand_regions
from lightning_zero.compile.layer_dedup.matching import NodeFingerprints
from lightning_zero.compile.subgraphs.repeats import RepeatedRun, find_repeats

__all__ = ["LayerMatch", "find_layers"]

MIN_NODES = 5  # of a layer
MAX_PHASES = 8  # that are tried
MIN_REPETITIONS = 3  # two are traced in nearly the time of one and a call


@dataclass(frozen=True)
class LayerMatch:
    """A part of the graph.

    Attributes:
        nodes: in order. What stands between them has nothing to do with them.
        given: what they read of the rest, in the order of their first uses.
        results: those of them that the rest reads.
    """

    nodes: tuple[Node, ...]
    given: tuple[Node, ...]
    results: tuple[Node, ...]

    @cached_property
    def places(self) -> list[Node]:
        """The nodes, and those of the checkpointed regions that they run."""
        return expand_regions(self.nodes)


def find_layers(graph: Graph, grad: bool, fingerprints: NodeFingerprints) -> list[LayerMatch]:
    """What repeats often enough, in order; they do not overlap, and are not all alike.

    Args:
        graph: Dynamo's.
        grad: whether gradients are taken where the graph says nothing else.
        texts: of the graph's nodes.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output") and not _idle(node)]
    keys = [fingerprints.node_key(node) for node in nodes]
    plain = _in_plain_settings(nodes, grad)
    found: list[LayerMatch] = []
    # A checkpointed layer is a call, and what is taken of its result.
    shortest = 2 if any(node.target in CHECKPOINTS for node in nodes) else MIN_NODES
    for run in find_repeats(keys, shortest):
        for phase in _phases(nodes, run)[:MAX_PHASES]:
            begins = range(run.start + phase, run.stop - run.period + 1, run.period)
            regions = [
                region
                for begin in begins
                if all(plain[begin : begin + run.period])
                and None not in keys[begin : begin + run.period]
                and _alone(region := _region(nodes[begin : begin + run.period]), fingerprints)
                and len(region.places) >= MIN_NODES
            ]
            if regions:
                found += regions
                break
    return found


def _phases(nodes: Sequence[Node], run: RepeatedRun) -> list[int]:
    """Where the repetitions of a run may begin, the best first: such that as few values as can be go from one into the
    next, and then such that there are as many as can be."""
    position = {node: at for at, node in enumerate(nodes)}
    crossing = [0] * (run.stop + 2)  # by how much more values pass there than one position earlier
    for at, node in enumerate(nodes[: run.stop]):
        last = max((position.get(user, run.stop) for user in node.users), default=at)
        if last > at:
            crossing[at + 1] += 1
            crossing[min(last, run.stop) + 1] -= 1
    for at in range(1, len(crossing)):
        crossing[at] += crossing[at - 1]

    def cost(phase: int) -> tuple[float, int]:
        begins = range(run.start + phase, run.stop - run.period + 1, run.period)
        return sum(crossing[at] for at in begins) / len(begins), -len(begins)

    return sorted(range(min(run.period, run.stop - run.start - run.period + 1)), key=cost)


def _region(work: Sequence[Node]) -> LayerMatch:
    beside = _beside(work)
    work = [node for node in work if node not in beside]
    own = set(work)
    given = dict.fromkeys(
        read for node in work for read in node.all_input_nodes if read not in own and not hop_body(read)
    )
    results = [node for node in work if any(user not in own for user in node.users)]
    return LayerMatch(tuple(work), tuple(given), tuple(results))


def _beside(work: Sequence[Node]) -> set[Node]:
    """What a layer makes of nothing that needs a gradient, and returns: it stays where it is. Layers of transformers
    that attend within a window each copy its length to where their keys are, for the next call."""
    own = set(work)
    written = {node_storage(node) for user in work for node in mutated_inputs(user)}
    found: set[Node] = set()
    for node in work:
        if any(user not in own for user in node.users):
            made_of, pending = {node}, [node]
            while pending:
                new = [read for read in pending.pop().all_input_nodes if read in own and read not in made_of]
                made_of.update(new)
                pending += new
            if all(_stays(made, written) for made in made_of):
                found |= made_of
    return found


def _stays(node: Node, written: set[int | None]) -> bool:
    value = node.meta.get(EXAMPLE_VALUE)
    plain = isinstance(value, Tensor) and not value.requires_grad and node_storage(node) not in written
    return plain and not _draws(node)  # or numbers would be drawn in another order


def _draws(node: Node) -> bool:
    """Whether it may draw random numbers."""
    value, target = node.meta[EXAMPLE_VALUE], node.target
    try:
        args, kwargs = map_arg((node.args, node.kwargs), lambda read: read.meta[EXAMPLE_VALUE])
        call = partial(getattr(args[0], target), *args[1:]) if isinstance(target, str) else partial(target, *args)
        with value.fake_mode, ForbidRandomOps(), torch.no_grad():
            call(**kwargs)
    except Exception:  # of what cannot be run by itself nobody knows
        return True
    return False


def _idle(node: Node) -> bool:
    return _name(node) in NO_OP_CALLS


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _alone(region: LayerMatch, fingerprints: NodeFingerprints) -> bool:
    """Whether the region can be differentiated by itself: it takes and returns tensors, edits nothing of the rest, and
    what it returns shares no memory with what it was given, or with other results."""
    if any(not isinstance(node.meta.get(EXAMPLE_VALUE), Tensor) for node in (*region.given, *region.results)):
        return False
    if any(fingerprints.describe_layout(node) is None for node in region.given):
        return False
    given = {node_storage(node) for node in region.given}
    results = [node_storage(node) for node in region.results]
    if not results or len(set(results)) < len(results) or given & set(results):
        return False
    return not any(node_storage(written) in given for node in region.places for written in mutated_inputs(node))


def _in_plain_settings(nodes: Sequence[Node], grad: bool) -> list[bool]:
    """Of each node, whether it runs as it would by itself: in no region with another autocast, with or without
    gradients, and with no setting made that is not known here."""
    found = []
    depth, plain_grad, unknown = 0, True, False
    for node in nodes:
        name = _name(node)
        if name in ENTER_CALLS:
            depth += 1
        elif name in EXIT_CALLS:
            depth -= 1
        elif name == SET_GRAD_ENABLED:
            plain_grad = node.args[0] is grad
        elif node.meta.get(EXAMPLE_VALUE) is None and name not in STATELESS_CALLS:
            unknown = True
        else:
            found.append(not depth and plain_grad and not unknown)
            continue
        found.append(False)
    return found
