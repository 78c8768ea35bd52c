"""Find repeated layers in Dynamo's graph that can be traced alone.

Nodes are compared by texts that are equal in other processes, too.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from lightning_zero.compat.compiler import BypassCache, check_node_safe
from lightning_zero.compat.graphs import (
    ENTER_CALLS,
    EXAMPLE_VALUE,
    EXIT_CALLS,
    NO_OP_CALLS,
    SET_GRAD_ENABLED,
    STATELESS_CALLS,
)
from lightning_zero.compat.tensors import CHECKPOINTS, SYMBOLIC, layout_key, size_key
from lightning_zero.compile.capture.dynamo_graph import mutated_inputs, node_storage
from lightning_zero.compile.fx_utils import ForbidRandomOps
from lightning_zero.compile.layer_dedup.hop_bodies import (
    FUNCTION_CALL,
    describe_policy,
    expand_regions,
    hop_body,
    is_region,
    regions,
)
from lightning_zero.compile.subgraphs.repeats import RepeatedRun, find_repeats
from lightning_zero.native.ops import NAMESPACE

_LITERALS = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def describe_layout(value: Any) -> str | None:
    """Return the properties of a value that a graph depends on.

    None for sizes that depend on data, subclasses and objects.
    """
    if isinstance(value, Tensor):
        key = layout_key(value) if value.layout == torch.strided else (None,)
        return None if None in key else f"{key}{value.requires_grad}"
    if isinstance(value, SYMBOLIC):
        formula = size_key(value)
        return None if formula is None else f"size {formula}"
    if isinstance(value, tuple | list):
        parts = ["None" if part is None else describe_layout(part) for part in value]  # attention may return no weights
        return None if None in parts else f"[{','.join(map(str, parts))}]"
    return repr(value) if type(value) in (int, float, bool) else None


class NodeFingerprints:
    """Descriptions of the nodes of a graph, computed once per node. The graph must not change meanwhile."""

    def __init__(self) -> None:
        self._layouts: dict[Node, str | None] = {}
        self._keys: dict[Node, str | None] = {}
        self._is_safe_target: dict[Any, bool] = {}

    def node_key(self, node: Node) -> str | None:
        """Return a text that is equal for equal calls on values of equal layout; None if undescribed."""
        if node not in self._keys:
            self._keys[node] = self._key(node)
        return self._keys[node]

    def layer_digest(self, region: LayerMatch) -> str | None:
        """Return a digest that is equal for equal layers in every process; None if a node is undescribed."""
        names = {node: f"%{number}" for number, node in enumerate((*region.inputs, *region.nodes))}
        lines = [f"given {self.describe_layout(node)} {node.op == 'placeholder'}" for node in region.inputs]
        for node in region.nodes:
            if not self._is_safe(node):
                return None
            reads: list[Node] = []  # separately, since the key does not tell which of two equal values is read where
            map_arg((node.args, node.kwargs), reads.append)
            lines.append(f"{self.node_key(node)} {[names.get(read) for read in reads]}")
        lines += [names[node] for node in region.results]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def describe_layout(self, node: Node) -> str | None:
        """Return :func:`describe_layout` of the node's value."""
        if node not in self._layouts:
            self._layouts[node] = describe_layout(node.meta.get(EXAMPLE_VALUE))
        return self._layouts[node]

    def arguments(self, node: Node, names: dict[Node, str] | None = None) -> str | None:
        """Return the arguments as text, with values named or described; None if one is undescribed."""
        known = names or {}
        described = {read: known.get(read) or self._described(read) for read in node.all_input_nodes}
        if None in described.values():
            return None
        arguments = map_arg((node.args, node.kwargs), lambda read: _Named(described[read]))
        return repr(arguments) if _is_literal([arguments]) else None

    def _key(self, node: Node) -> str | None:
        if node.op not in ("call_function", "call_method"):
            return None
        # Experts of transformers' mixtures are sorted in this way.
        layout = "nothing" if node.target is operator.setitem else self.describe_layout(node)
        arguments = None if layout is None else self.arguments(node)
        return None if arguments is None else f"{node.op} {_name(node)} {arguments} {layout}"

    def _is_safe(self, node: Node) -> bool:
        if node.op != "call_function":  # for a method the type of its object matters
            return _is_safe_target(node)
        if node.target not in self._is_safe_target:
            self._is_safe_target[node.target] = _is_safe_target(node)
        return self._is_safe_target[node.target]

    def _described(self, node: Node) -> str | None:
        if (body := hop_body(node)) is not None:
            return self._describe_body(body, is_region(node))
        # An item of a region's result belongs to that region where two kinds of layers meet.
        made_by = [str(self._describe_body(body, True)) for body in regions(node)]
        return f"<{self.describe_layout(node)} {made_by}>"

    def _describe_body(self, body: GraphModule, region: bool) -> str | None:
        """Return a digest of a called graph; None if a node is undescribed.

        Functions that read weights are undescribed, since each weight has its own name.
        """
        names = {node: f"%{number}" for number, node in enumerate(body.graph.nodes)}
        lines = [describe_policy(body)]
        for node in body.graph.nodes:
            inner = hop_body(node) if region else None
            arguments, called = self.arguments(node, names) if inner is None else self._described(node), _name(node)
            value = node.meta.get(EXAMPLE_VALUE)
            layout = self.describe_layout(node)
            if arguments is None or not self._is_safe(node) or (node.op == "get_attr" and inner is None):
                return None
            if (value is not None and layout is None) if region else f"{NAMESPACE}." in called:
                return None
            lines.append(f"{node.op} {called if node.op[:5] == 'call_' else ''} {arguments} {layout}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _is_safe_target(node: Node) -> bool:
    if node.target is FUNCTION_CALL:
        return True  # its graphs describe it
    try:
        check_node_safe(node)
    except BypassCache:
        return False  # its name does not describe it
    return True


def find_undescribed(nodes: Iterable[Node]) -> Node | None:
    """Return the first call without a description."""
    calls = [node for node in nodes if node.op in ("call_function", "call_method")]
    fingerprints = NodeFingerprints()
    return next((node for node in calls if not _is_safe_target(node) or fingerprints.arguments(node) is None), None)


def _name(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, str):
        return target
    if hasattr(target, "overloadpacket") or not hasattr(target, "__qualname__"):
        return str(target)
    return f"{getattr(target, '__module__', None)}.{target.__qualname__}"


class _Named(str):
    __repr__ = str.__str__


def _is_literal(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, dict):
            if not _is_literal(value.values()):
                return False
        elif isinstance(value, slice):
            if not _is_literal((value.start, value.stop, value.step)):
                return False
        elif isinstance(value, tuple | list):
            if not _is_literal(value):
                return False
        elif not (isinstance(value, _Named) or type(value) in _LITERALS or value is Ellipsis):
            return False
    return True


MIN_NODES = 5  # smallest layer
MAX_PHASES = 8  # phases to try per run
MIN_REPETITIONS = 3  # two layers take nearly as long as one and a call


@dataclass(frozen=True)
class LayerMatch:
    """A layer in Dynamo's graph.

    Attributes:
        nodes: in order; nodes between them are independent of them.
        sizes: symbolic sizes that it reads, or that are symbols of its tensors.
        tensors: the other inputs.
        numbers: nodes outside of it that compute numbers from ``sizes``, in order.
        results: nodes that the rest of the graph reads.
    """

    nodes: tuple[Node, ...]
    sizes: tuple[Node, ...]
    tensors: tuple[Node, ...]
    results: tuple[Node, ...]
    numbers: tuple[Node, ...] = ()

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (*self.sizes, *self.tensors)

    @cached_property
    def places(self) -> list[Node]:
        """Return the nodes, followed by those of their checkpointed regions."""
        return expand_regions(self.nodes)


def find_layers(graph: Graph, grad: bool, fingerprints: NodeFingerprints) -> list[LayerMatch]:
    """Return disjoint layers that repeat often enough, in order; they may be of several kinds."""
    others = ("placeholder", "get_attr", "output")
    numbers = _numbers(graph)
    nodes = [
        node
        for node in graph.nodes
        if node.op not in others and _target_name(node) not in NO_OP_CALLS and node not in numbers
    ]
    keys = [fingerprints.node_key(node) for node in nodes]
    plain = _in_plain_settings(nodes, grad)
    symbols = {size_key(node.meta[EXAMPLE_VALUE]): node for node in reversed(numbers) if node.op == "placeholder"}
    found: list[LayerMatch] = []
    # A checkpointed layer is a call and an item of its result.
    shortest = 2 if any(node.target in CHECKPOINTS for node in nodes) else MIN_NODES
    kinds: set[tuple[str | None, ...]] = set()
    for run in find_repeats(keys, shortest):

        def is_new(phase: int, begin: int = run.start, period: int = run.period) -> bool:
            return tuple(keys[begin + phase : begin + phase + period]) not in kinds

        # Another run of a known layer begins where that layer does, so that both are one kind.
        for phase in sorted(_phases(nodes, run)[:MAX_PHASES], key=is_new):
            begins = range(run.start + phase, run.stop - run.period + 1, run.period)
            regions = [
                region
                for begin in begins
                if all(plain[begin : begin + run.period])
                and None not in keys[begin : begin + run.period]
                and _is_separable(region := _match(nodes[begin : begin + run.period], numbers, symbols), fingerprints)
                and len(region.places) >= MIN_NODES
            ]
            if regions:
                found += regions
                kinds.add(tuple(keys[begins[0] : begins[0] + run.period]))
                break
    return found


def _phases(nodes: Sequence[Node], run: RepeatedRun) -> list[int]:
    """Return offsets at which repetitions may begin: fewest values passed on first, then most repetitions."""
    position = {node: at for at, node in enumerate(nodes)}
    crossing = [0] * (run.stop + 2)  # change in the number of values that cross each position
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


def _numbers(graph: Graph) -> dict[Node, None]:
    """Return the symbols among the graph's inputs and the numbers computed from them, in order.

    Dynamo computes each number once. The first layer may compute it and others read it.
    """
    found: dict[Node, None] = {}
    for node in graph.nodes:
        value = node.meta.get(EXAMPLE_VALUE)
        if isinstance(value, SYMBOLIC) and size_key(value) is not None:
            given = node.op == "placeholder" and isinstance(value, SymInt)
            if given or (node.all_input_nodes and all(read in found for read in node.all_input_nodes)):
                found[node] = None
    return found


def _match(work: Sequence[Node], numbers: Mapping[Node, None], symbols: Mapping[Any, Node]) -> LayerMatch:
    independent = _independent_nodes(work)
    work = [node for node in work if node not in independent]
    own = set(work)
    given = dict.fromkeys(
        read for node in work for read in node.all_input_nodes if read not in own and not hop_body(read)
    )
    results = [node for node in work if any(user not in own for user in node.users)]
    read = {node for node in given if node in numbers}
    tensors = tuple(node for node in given if node not in read)
    pending = list(read)
    while pending:
        read.update(new := [node for node in pending.pop().all_input_nodes if node not in read])
        pending += new
    if symbols:
        # The whole graph reads symbols from its inputs, too.
        used = set().union(*(_free_symbols(node) for node in tensors))
        read |= {node for symbol, node in symbols.items() if symbol in used}
    known = [node for node in numbers if node in read] if read else []
    sizes = tuple(node for node in known if node.op == "placeholder")
    own_numbers = tuple(node for node in known if node.op != "placeholder")
    return LayerMatch(tuple(work), sizes, tensors, tuple(results), own_numbers)


def _free_symbols(node: Node) -> set[Any]:
    value = node.meta.get(EXAMPLE_VALUE)
    keys = map(size_key, (*value.shape, *value.stride())) if isinstance(value, Tensor) else ()
    return {symbol for key in keys for symbol in getattr(key, "free_symbols", ())}


def _independent_nodes(work: Sequence[Node]) -> set[Node]:
    """Return nodes that need no gradient and that other code reads; they stay in the graph.

    transformers' sliding-window layers copy a length to their keys' device for the next call.
    """
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
            if all(_can_stay(made, written) for made in made_of):
                found |= made_of
    return found


def _can_stay(node: Node, written: set[int | None]) -> bool:
    value = node.meta.get(EXAMPLE_VALUE)
    plain = isinstance(value, Tensor) and not value.requires_grad and node_storage(node) not in written
    return plain and not _may_draw_random(node)  # random numbers would be drawn in another order


def _may_draw_random(node: Node) -> bool:
    value, target = node.meta[EXAMPLE_VALUE], node.target
    try:
        args, kwargs = map_arg((node.args, node.kwargs), lambda read: read.meta[EXAMPLE_VALUE])
        call = partial(getattr(args[0], target), *args[1:]) if isinstance(target, str) else partial(target, *args)
        with value.fake_mode, ForbidRandomOps(), torch.no_grad():
            call(**kwargs)
    except Exception:  # unknown, since the node cannot run alone
        return True
    return False


def _target_name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _is_separable(region: LayerMatch, fingerprints: NodeFingerprints) -> bool:
    """Return True if the layer can be differentiated alone.

    It takes and returns tensors, mutates no input, and its results share no memory with inputs or with each other.
    """
    if any(not isinstance(node.meta.get(EXAMPLE_VALUE), Tensor) for node in (*region.tensors, *region.results)):
        return False
    if any(fingerprints.describe_layout(node) is None for node in region.inputs):
        return False
    given = {node_storage(node) for node in region.tensors}
    results = [node_storage(node) for node in region.results]
    if not results or len(set(results)) < len(results) or given & set(results):
        return False
    return not any(node_storage(written) in given for node in region.places for written in mutated_inputs(node))


def _in_plain_settings(nodes: Sequence[Node], grad: bool) -> list[bool]:
    """Return for each node True if it runs in default modes (autocast, grad) and after known settings."""
    found = []
    depth, plain_grad, unknown = 0, True, False
    for node in nodes:
        name = _target_name(node)
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
