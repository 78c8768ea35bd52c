"""A copy of torch's min-cut partitioner with faster helpers. It finds the same partition.

For a model of 48 layers torch's own spends 5 CPU seconds more. It copies the joint graph five times, searches the whole
graph for one cut, and copies the graph again to merge equal nodes. :func:`fast_partitioner` binds torch's functions to
a copy of their namespace, in which some helpers are replaced. Torch's module stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from math import inf
from types import FunctionType, SimpleNamespace
from typing import Any

import networkx
import sympy
import torch
from functorch.compile import min_cut_rematerialization_partition as min_cut_partition
from networkx.algorithms.flow import boykov_kolmogorov
from networkx.algorithms.flow import minimum_cut as networkx_minimum_cut
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.compiler import inductor_partition
from lightning_zero.compat.lookup import module, private
from lightning_zero.compat.patches import Patch
from lightning_zero.compat.tensors import OpOverload, storage_key

partitioners = module("torch._functorch.partitioners")
compile_utils = module("torch._functorch.compile_utils")
auto_functionalize = module("torch._higher_order_ops.auto_functionalize")
triton_kernel_wrap = module("torch._higher_order_ops.triton_kernel_wrap")
pattern_matcher = module("torch._inductor.pattern_matcher")
# Orders a node after others, such as the events of streams. (torch 2.11+)
control_deps = private("torch._inductor.fx_passes.control_dependencies.control_deps")

Partitioner = Callable[..., tuple[GraphModule, GraphModule]]
Extract = Callable[..., Graph]

# Torch 2.15 has a fast minimum cut of its own.
TORCH_HAS_FAST_CUT = hasattr(partitioners, "minimum_cut")

_PARTITION = "torch._functorch.partitioners"
_COPIES = Patch(
    "the partitioner copies fewer joint graphs",
    {
        # Copies the nodes that lead from inputs to outputs. (torch 2.11+)
        f"{_PARTITION}._extract_graph_with_inputs_outputs": (
            "joint_graph, inputs, outputs, outputs_descs, subgraph, ignore_must_be_in_fw_bw"
        ),
        # Extracts a forward graph, of which it reads the names of nodes. (torch 2.11+)
        f"{_PARTITION}.classify_nodes": "joint_module, static_lifetime_input_indices, num_fwd_outputs",
        # Copies a backward graph in the order of autograd. (torch 2.11+)
        f"{_PARTITION}.reordering_to_mimic_autograd_engine": "gm",
        # Copies a graph without nodes that are equal to an earlier one. (torch 2.11+)
        f"{_PARTITION}.fx_graph_cse": ("fx_g", "fx_g, extra_node_key"),
    },
    needs={
        # Return True if a node is tagged for one side, or mutates the memory of such a node. (torch 2.11+)
        f"{_PARTITION}._must_be_in_backward": "node",
        f"{_PARTITION}._must_be_in_forward": "node",
        # Compare two nodes for mutations between them, and find nodes that mutate. (torch 2.11+)
        "torch._inductor.pattern_matcher.same_mutation_regions": "a, b",
        "torch._inductor.pattern_matcher.is_mutation_op": "node",
        # An op without its overload, and those that draw random numbers. (torch 2.11+)
        "torch._functorch.compile_utils.get_aten_target": "node",
        "torch._functorch.compile_utils.rand_ops": None,
        # The names of the arguments that an op mutates. (torch 2.11+)
        "torch._higher_order_ops.auto_functionalize.get_mutable_args": "op",
    },
)
_CUT = Patch(
    "the minimum cut of a joint graph is searched in its connected parts",
    # The partitioner calls networkx by this name. (torch 2.11+)
    {} if TORCH_HAS_FAST_CUT else {"networkx.minimum_cut": "flowG, _s, _t, capacity, flow_func, backend, **kwargs"},
)


def fast_partitioner(partition: Any = min_cut_partition) -> Partitioner:
    """Return a partitioner that returns the same forward and backward graphs in less time.

    Args:
        partition: torch's min-cut partitioner, or Inductor's, which runs its passes first.
    """
    fast = partition
    if _COPIES.reason:
        _COPIES.log_once()
    else:
        fast = _names_with_faster_helpers()["min_cut_rematerialization_partition"]
        if partition is inductor_partition:
            fast = _rebind(partition, {**partition.__globals__, "min_cut_rematerialization_partition": fast})

    @wraps(partition)
    def run(*args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        with _cut_in_parts():
            return fast(*args, **kwargs)  # type: ignore[no-any-return]

    return run


def _names_with_faster_helpers() -> dict[str, Any]:
    """Return a copy of the namespace of torch's partitioner whose functions look up their globals in it."""
    own = vars(partitioners)
    names = dict(own)
    for name, value in own.items():
        if isinstance(value, FunctionType) and value.__globals__ is own:
            names[name] = _rebind(value, names)
    plain: Extract = names["_extract_graph_with_inputs_outputs"]

    def list_nodes(*args: Any, **kwargs: Any) -> Any:
        return _list_nodes(plain, *args, **kwargs)

    faster = {
        "_extract_graph_with_inputs_outputs": _BackwardReuse(_NeededExtract(plain)),
        "classify_nodes": _rebind(own["classify_nodes"], names | {"_extract_graph_with_inputs_outputs": list_nodes}),
        "reordering_to_mimic_autograd_engine": _reorder_in_place(own["reordering_to_mimic_autograd_engine"]),
        "fx_graph_cse": _merge_equal_nodes,
    }
    for name, function in faster.items():
        names[name] = _COPIES.count_calls(f"{_PARTITION}.{name}", function)
    return names


def _rebind(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Extraction of a forward and a backward graph.


def _list_nodes(plain: Extract, joint: Graph, inputs: Sequence[Node], outputs: Sequence[Any], *others: Any) -> Any:
    """Return the nodes that a copy of the forward graph would have, in place of the copy."""
    kept = _find_needed(joint, inputs, outputs, "forward")
    if kept is None:
        return plain(joint, inputs, outputs, *others)
    found = {*inputs, *kept}
    return SimpleNamespace(nodes=[node for node in joint.nodes if node in found])


class _NeededExtract:
    """Copies only the nodes that a side needs. Torch copies all others too, and removes dead code later."""

    def __init__(self, plain: Extract) -> None:
        self._plain = plain

    def __call__(
        self,
        joint: Graph,
        inputs: Sequence[Node],
        outputs: Any,
        descriptions: Any,
        side: str | None = None,
        ignore_must_be_in_fw_bw: bool = False,
    ) -> Graph:
        kept = None if ignore_must_be_in_fw_bw else _find_needed(joint, inputs, outputs, side)
        if kept is None:
            return self._plain(joint, _Inputs(inputs), outputs, descriptions, side, ignore_must_be_in_fw_bw)
        needed: Any = SimpleNamespace(nodes=kept)
        return self._plain(needed, _Inputs(inputs), outputs, descriptions, side)


class _BackwardReuse:
    """Returns the last backward graph again if the partitioner only drops unread inputs."""

    def __init__(self, extract: Extract) -> None:
        self._extract = extract
        self._last: tuple[Graph, list[Node], Any] | None = None

    def __call__(
        self, joint: Graph, inputs: Sequence[Node], outputs: Any, descriptions: Any, side: str | None = None, **how: Any
    ) -> Graph:
        others = joint, list(outputs), how
        if side == "backward" and self._last is not None:
            (graph, known, same), self._last = self._last, None
            if same == others and _drop_unread_inputs(graph, known, inputs):
                return graph
        graph = self._extract(joint, inputs, outputs, descriptions, side, **how)
        if side == "backward":
            for node in graph.find_nodes(op="placeholder"):
                node.meta = dict(node.meta)  # torch shares it with the forward graph, whose notes would appear here
            self._last = graph, list(inputs), others
        return graph


class _Inputs(list[Node]):
    """A list with a fast membership test: torch makes one for each node of the graph."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__(nodes)
        self._all = frozenset(nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._all


def _find_needed(joint: Graph, inputs: Sequence[Node], outputs: Sequence[Any], side: str | None) -> list[Node] | None:
    """Return the nodes between inputs and outputs, and impure ones, in order.

    Returns:
        None if an output does not follow from the inputs, or the graph has control dependencies, for which torch 2.14
        has rules of its own.
    """
    in_backward, in_forward = partitioners._must_be_in_backward, partitioners._must_be_in_forward
    excluded = [other for other, own in ((in_backward, "backward"), (in_forward, "forward")) if side != own]
    available, made = set(inputs), []
    for node in joint.nodes:
        if node.target is control_deps:
            return None
        if node in available or node.op in ("placeholder", "output") or any(other(node) for other in excluded):
            continue
        if available.issuperset(node.all_input_nodes):
            available.add(node)
            made.append(node)
    read = {node for node in outputs if isinstance(node, Node)}
    if not available.issuperset(read):
        return None
    kept = []
    for node in reversed(made):
        if node in read or node.is_impure():  # torch removes those that it takes for dead code
            kept.append(node)
            read.update(node.all_input_nodes)
    return kept[::-1]


def _drop_unread_inputs(graph: Graph, known: Sequence[Node], inputs: Sequence[Node]) -> bool:
    """Drop all other inputs of a graph. Return False if it reads one of them, or the order differs.

    Impure nodes are an exception: without the input the graph would compute the node itself.
    """
    left = set(inputs)
    copies = graph.find_nodes(op="placeholder")
    dropped = [(node, copy) for node, copy in zip(known, copies, strict=True) if node not in left]
    if [node for node in known if node in left] != list(inputs):
        return False
    if any(copy.users or (node.op != "placeholder" and node.is_impure()) for node, copy in dropped):
        return False
    for _, copy in dropped:
        graph.erase_node(copy)
    return True


def _reorder_in_place(reorder: FunctionType) -> Callable[..., Any]:
    """Return torch's function, which then moves nodes instead of copying them."""
    fake = SimpleNamespace(Graph=_Order, GraphModule=_apply_order, Node=Node)
    return _rebind(reorder, reorder.__globals__ | {"fx": fake, "torch": SimpleNamespace(fx=fake, ops=torch.ops)})


class _Order:
    """Takes the place of the new graph, and records the order of its nodes."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def node_copy(self, node: Node, copied: Callable[[Node], Node]) -> Node:
        self.nodes.append(node)
        return node


def _apply_order(module: GraphModule, order: _Order) -> GraphModule:
    kept = set(order.nodes)
    for node in reversed(module.graph.nodes):
        if node not in kept:
            module.graph.erase_node(node)
    for before, node in zip(order.nodes, order.nodes[1:], strict=False):
        if before.next is not node:
            before.append(node)
    module.recompile()
    return module


# Common subexpressions.


def _merge_equal_nodes(graph: Graph, extra_node_key: Callable[[Node], Hashable] | None = None) -> Graph:
    """Remove nodes that are equal to an earlier one, in place, by the rules of the newest torch.

    Args:
        extra_node_key: torch 2.14 passes the partitioner's. Only nodes with equal keys are merged, so that a value that
            only forward uses does not become one that is saved for backward.
    """
    _number_mutation_regions(graph)
    written = _find_bases_of_writes(graph)
    returned = {_storage_id(node) for node in graph.output_node().all_input_nodes} - {0}
    first: dict[Hashable, Node] = {}
    unmergeable: dict[int, bool] = {}  # by id of the target
    for node in list(graph.nodes):
        if node.op != "call_function" or isinstance(node.meta.get("val"), sympy.Symbol):
            continue
        target = id(node.target)
        if target not in unmergeable:
            unmergeable[target] = _is_unmergeable(node)
        if unmergeable[target] or node in written or (not isinstance(node.target, OpOverload) and node.is_impure()):
            continue
        try:
            args = [argument if type(argument) is Node else _hashable(argument) for argument in node.args]
            extra = extra_node_key(node) if extra_node_key else None, *_stream(node)
            key = target, extra, *args, _hashable(node.kwargs) if node.kwargs else None
            same = first.get(key)
        except TypeError:  # an argument that is not hashable
            continue
        # Never merge graph outputs: the caller may mutate one of them.
        if same is not None and _storage_id(node) in returned:
            continue
        if same is None or _storage_id(same) in returned or not pattern_matcher.same_mutation_regions(node, same):
            first[key] = node
        else:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    return graph


def _number_mutation_regions(graph: Graph) -> None:
    """Number nodes by the mutations before them, as torch does. Nodes of different regions are not equal."""
    number, mutates = 0, dict[int, bool]()
    for node in graph.nodes:
        target = id(node.target)
        if target not in mutates or not isinstance(node.target, OpOverload):  # an op's schema answers for all its calls
            mutates[target] = pattern_matcher.is_mutation_op(node)
        number += mutates[target]
        node.meta["mutation_region_id"] = number


def _storage_id(node: Node) -> int:
    value = node.meta.get("val")
    try:
        return storage_key(value) if isinstance(value, Tensor) else 0
    except NotImplementedError:  # sparse
        return 0


def _find_bases_of_writes(graph: Graph) -> set[Node]:
    """Return nodes into whose memory a functionalized op writes: each needs memory of its own."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.auto_functionalized_v2:
            found.update(_nodes(node.kwargs.get("_all_bases", ())))
        elif node.target is torch.ops.higher_order.auto_functionalized:
            names, _ = auto_functionalize.get_mutable_args(node.args[0])
            found.update(_nodes([node.kwargs.get(name) for name in names]))
        elif node.target is triton_kernel_wrap.triton_kernel_wrapper_functional:
            args = node.kwargs.get("kwargs", {})
            found.update(_nodes([args.get(name) for name in node.kwargs.get("tensors_to_clone", ())]))
    return found


def _nodes(values: Any) -> list[Node]:
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]
    return [one for one in flat if isinstance(one, Node)]


def _stream(node: Node) -> tuple[Hashable, ...]:
    """Return the stream and the memory pool of a node, if the graph names them."""
    custom = node.meta.get("custom", {})
    return custom.get("stream", 0), custom.get("mempool"), custom.get("mempool_device")


def _is_unmergeable(node: Node) -> bool:
    target = compile_utils.get_aten_target(node)
    random = target in compile_utils.rand_ops or target is torch.ops.aten.empty
    return random or (isinstance(node.target, OpOverload) and node.is_impure())


def _hashable(argument: Any) -> Hashable:
    """Return a key that is equal for equal arguments only: in Python 1 == 1.0 == True, and 0.0 == -0.0."""
    kind = type(argument)
    if kind is Node:
        return argument
    if isinstance(argument, tuple | list):
        return kind, *map(_hashable, argument)
    if isinstance(argument, dict):
        return kind, *((key, _hashable(value)) for key, value in argument.items())
    if kind is float:
        return kind, argument.hex()
    if kind is complex:
        return kind, argument.real.hex(), argument.imag.hex()
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        return kind, argument.node
    return kind, argument


# The minimum cut.

# Edges between the nodes of a part, by their numbers, and capacities.
Part = tuple[tuple[tuple[int, int], Any], ...]
SOURCE, SINK = -1, -2


@_CUT
@contextmanager
def _cut_in_parts() -> Iterator[None]:
    with nullcontext() if TORCH_HAS_FAST_CUT else _CUT.replace({"minimum_cut": lambda plain: minimum_cut}):
        yield


def minimum_cut(network: Any, source: Any, sink: Any) -> tuple[Any, tuple[set[Any], set[Any]]]:
    """Return the value and both sides of the minimum cut nearest to the sink.

    Has the arguments and result of ``networkx.minimum_cut``.

    Without the nodes that are bound to a side, the network of a joint graph falls apart into small parts. Equal parts
    are cut once. The cut nearest to the sink is unique, so the result does not depend on the algorithm.

    Raises:
        networkx.NetworkXUnbounded: nothing that may be cut is between source and sink.
    """
    before, behind = _find_bound(network.succ, source), _find_bound(network.pred, sink)
    if not before.isdisjoint(behind):
        return networkx_minimum_cut(network, source, sink, flow_func=boykov_kolmogorov)  # which raises it
    value = sum(_capacity(edge) for node in before for to, edge in network.succ[node].items() if to in behind)
    known: dict[Part, tuple[Any, frozenset[int]]] = {}
    for nodes in _find_parts(network, before, behind):
        part = _edges(network, nodes, before, behind)
        if part not in known:
            known[part] = _cut_part(part)
        cost, beyond = known[part]
        value += cost
        behind |= {nodes[number] for number in beyond}
    return value, (set(network) - behind, behind)


def _find_bound(edges: Mapping[Any, Mapping[Any, Any]], start: Any) -> set[Any]:
    """Return the nodes that no finite cut separates from ``start``."""
    found, pending = {start}, [start]
    while pending:
        for node, edge in edges[pending.pop()].items():
            if node not in found and _capacity(edge) == inf:
                found.add(node)
                pending.append(node)
    return found


def _capacity(edge: Mapping[str, Any]) -> Any:
    return edge.get("capacity", inf)


def _find_parts(network: Any, before: set[Any], behind: set[Any]) -> Iterator[list[Any]]:
    """Yield connected nodes of neither side. Equal parts have equal orders of nodes."""
    found = before | behind
    for first in network:
        if first in found:
            continue
        found.add(first)
        part = [first]
        for node in part:  # grows in the loop
            for to in (*network.succ[node], *network.pred[node]):
                if to not in found:
                    found.add(to)
                    part.append(to)
        yield part


def _edges(network: Any, nodes: list[Any], before: set[Any], behind: set[Any]) -> Part:
    numbers = {node: number for number, node in enumerate(nodes)}
    edges: dict[tuple[int, int], Any] = {}
    for number, node in enumerate(nodes):
        for to, edge in network.succ[node].items():
            if to not in before:
                between = number, numbers.get(to, SINK)
                edges[between] = edges.get(between, 0) + _capacity(edge)
        for read, edge in network.pred[node].items():
            if read in before:
                edges[SOURCE, number] = edges.get((SOURCE, number), 0) + _capacity(edge)
    return tuple(edges.items())


def _cut_part(part: Part) -> tuple[Any, frozenset[int]]:
    """Return the value of the cut, and the nodes on the sink's side."""
    network: Any = networkx.DiGraph()
    network.add_nodes_from((SOURCE, SINK))
    network.add_edges_from((*between, {"capacity": capacity}) for between, capacity in part)
    value, (_, beyond) = networkx_minimum_cut(network, SOURCE, SINK, flow_func=boykov_kolmogorov)
    return value, frozenset(beyond) - {SINK}
