"""What each node of a graph costs: floating-point operations, bytes moved, and seconds on a device.

The estimate is simple on purpose. It serves to compare places for a transfer, not to predict a step's time to the
percent.

* Operations are counted by torch's own formulas (``torch.utils.flop_counter``); an op without one has none.
* Views cost nothing.
* Elementwise ops, reductions and constants that follow one another, without a matrix product or another such op in
  between, count as fused: as one launch, which reads once what enters it and writes once what leaves it. What one of
  them makes and only others of them read costs nothing. Inductor fuses less than that in places.
* A transfer costs the compute stream its launch; a gradient that is handed over costs a copy into its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg
from torch.utils.flop_counter import flop_registry

from lightning_zero.compat import tensors as ops
from lightning_zero.compat.tensors import tree_map_only
from lightning_zero.native.ops import find_op
from lightning_zero.profiling.tensors import (
    Storage,
    aliases_input,
    called_op,
    is_view,
    nbytes,
    read_bytes,
    size_hint,
    storages,
    tensors_of,
    nodes_where,
    view_base,
)

__all__ = ["DeviceSpeed", "FlopCache", "NodeCost", "fusion_groups", "graph_costs", "node_flops", "op_flops"]

_aten = torch.ops.aten
# Ops that torch has no formula for, next to those that take the same arguments first and do the same.
_SAME_FORMULA: dict[Any, Any] = {
    ops.flash_attention_on_cpu: ops.flash_attention,
    ops.flash_attention_on_cpu_backward: ops.flash_attention_backward,
}
_FUSED_TAGS = {torch.Tag.pointwise, torch.Tag.reduction}
# Reading at places that another tensor tells fuses as well, though torch gives it no such tag.
_FUSED_OPS = {ops.to_copy, _aten.gather.default}


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device can do.

    Attributes:
        flops_per_s: floating-point operations per second in a matrix product, by dtype.
        bytes_per_s: read or written, in a copy.
        launch_s: seconds that starting a kernel takes, whatever it does.
    """

    flops_per_s: Mapping[torch.dtype, float]
    bytes_per_s: float
    launch_s: float

    @classmethod
    def of(cls, device: torch.device) -> DeviceSpeed:
        """Measured on the spot, in well under a second. Draws no random numbers."""
        return _measure(device)

    def flops(self, dtype: torch.dtype) -> float:
        """Of a dtype that was not measured: the slowest that was."""
        return self.flops_per_s.get(dtype) or min(self.flops_per_s.values())

    def seconds(self, flops: int, moved: int, dtype: torch.dtype, launches: int = 1) -> float:
        """For a kernel that computes and moves bytes at the same time."""
        return max(flops / self.flops(dtype) if flops else 0.0, moved / self.bytes_per_s) + launches * self.launch_s


class NodeCost(NamedTuple):
    """What one node costs. ``read`` and ``written`` are bytes."""

    name: str
    flops: int = 0
    read: int = 0
    written: int = 0
    seconds: float = 0.0


def graph_costs(graph: Graph, speed: DeviceSpeed) -> list[NodeCost]:
    """The cost of every node, in the graph's order; inputs, views and the output cost nothing."""
    held = storages(graph)
    runs = fusion_groups(graph)
    launched: set[int] = set()
    entered: dict[tuple[int, Storage], int] = {}
    flops = FlopCache()
    aliasing = nodes_where(graph.nodes, aliases_input)
    costs = []
    for node in graph.nodes:
        run = runs.get(node)
        if run is None and (node.op != "call_function" or (node in aliasing and is_view(node))):
            costs.append(NodeCost(node.name))
        elif run is not None:
            read = sum([_enters(source, run, runs, held, entered) for source in _sources(node)])
            written = nbytes(node.meta.get("val")) if _leaves(node, run, runs) else 0
            launches = int(run not in launched)
            launched.add(run)
            seconds = speed.seconds(0, read + written, torch.float32, launches)
            costs.append(NodeCost(node.name, 0, read, written, seconds))
        else:
            costs.append(_alone(node, held, speed, flops))
    return costs


class FlopCache:
    """Floating-point operations of nodes. Those of equal ones, as equal layers have them, are found once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, str], int] = {}

    def of(self, node: Node) -> int:
        """See :func:`node_flops`."""
        op, given = called_op(node)
        if _formula(op) is None:
            return 0
        sizes = map_arg((given, dict(node.kwargs)), lambda read: str(_sizes(read)))  # type: ignore[return-value]
        key = op, f"{sizes} {_sizes(node)}"
        if key not in self._known:
            self._known[key] = node_flops(node)
        return self._known[key]


def _sizes(node: Node) -> list[Any]:
    return [tensor.shape for tensor in tensors_of(node.meta.get("val"))] or [node.meta.get("val")]


def node_flops(node: Node) -> int:
    """Floating-point operations of a node by torch's formula for its op; 0 where there is none."""
    op, given = called_op(node)
    if _formula(op) is None:
        return 0
    # Formulas compare sizes, and a comparison of symbolic sizes would add a guard.
    args, kwargs, value = tree_map_only(
        Tensor, _concrete, (*map_arg((given, dict(node.kwargs)), _value), node.meta.get("val"))
    )
    kwargs = {name: value for name, value in kwargs.items() if op is node.target or name != "rng_state"}
    return op_flops(op, args, kwargs, value)


def op_flops(op: Any, args: Any, kwargs: Any, value: Any) -> int:
    """The same of one call of an op, which gave ``value``."""
    formula = _formula(op)
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=value))
    except Exception:  # a formula that does not know this use of its op must end neither a compilation nor a step
        return 0


def _formula(op: Any) -> Callable[..., Any] | None:
    packet = op.overloadpacket if isinstance(op, ops.OpOverload) else op
    formula = flop_registry.get(packet)
    if formula is None and isinstance(op, ops.OpOverload):
        formula = flop_registry.get(_SAME_FORMULA.get(packet))
    return formula


def _alone(node: Node, held: dict[Node, tuple[Storage | None, ...]], speed: DeviceSpeed, found: FlopCache) -> NodeCost:
    kind = _transfer(node)
    if kind == "gather":
        return NodeCost(node.name, seconds=speed.launch_s)
    sources = _sources(node)
    value = node.meta.get("val")
    if kind == "reduce":
        read = written = nbytes(map_arg(node.args[0], _value))  # the gradients; the shards only say whose they are
    else:
        read = sum(read_bytes(source, _only(held[source])) for source in sources)
        written = nbytes(value)
    flops = found.of(node)
    dtypes = [tensor.dtype for source in sources for tensor in tensors_of(source.meta.get("val"))]
    dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    return NodeCost(node.name, flops, read, written, speed.seconds(flops, read + written, dtype))


def fusion_groups(graph: Graph) -> dict[Node, int]:
    """The run of fused nodes that each fused node belongs to."""
    runs, run = {}, 0
    aliasing, fusing = nodes_where(graph.nodes, aliases_input), nodes_where(graph.nodes, _fuses)
    apart = nodes_where(graph.nodes, lambda node: _transfer(node) is not None)
    for node in graph.nodes:
        if node.op != "call_function" or node in apart:
            continue
        if _is_fused(node, node in aliasing, node in fusing):
            runs[node] = run
        elif node not in aliasing or not is_view(node):
            run += 1
    return runs


def _is_fused(node: Node, aliasing: bool, fusing: bool) -> bool:
    """Of what is no transfer."""
    if not isinstance(node.target, ops.OpOverload):
        return False
    if aliasing and view_base(node) is not None:  # a view, or an op that writes in place
        return False
    return bool(tensors_of(node.meta.get("val"))) and (fusing or not _sources(node))


def _fuses(node: Node) -> bool:
    target = node.target
    if not isinstance(target, ops.OpOverload):
        return False
    return bool(_FUSED_TAGS.intersection(target.tags)) or target in _FUSED_OPS


def _transfer(node: Node) -> str | None:
    target = node.target
    return _transfers(target) if isinstance(target, ops.OpOverload) else None


@cache
def _transfers(target: ops.OpOverload) -> str | None:
    if (ours := find_op(target)) is not None:
        return "reduce" if ours.copies_grads else "gather"
    return "gather" if target.namespace == "_c10d_functional" else None


def _enters(
    source: Node,
    run: int,
    runs: dict[Node, int],
    held: dict[Node, tuple[Storage | None, ...]],
    entered: dict[tuple[int, Storage], int],
) -> int:
    """Bytes of a fused node's input that its run has to read and has not read yet."""
    storage = _only(held[source])
    if storage is None or runs.get(_maker(source, runs)) == run:
        return 0
    before = entered.get((run, storage), 0)
    now = entered[run, storage] = min(before + read_bytes(source, storage), storage.nbytes)
    return now - before


def _leaves(node: Node, run: int, runs: dict[Node, int]) -> bool:
    """Whether someone outside its run reads what a fused node makes."""
    pending = [node]
    for made in pending:  # which grows
        for user in made.users:
            if user in runs:
                if runs[user] != run:
                    return True
            elif is_view(user):
                pending.append(user)
            else:
                return True
    return False


def _maker(node: Node, runs: dict[Node, int]) -> Node:
    while node not in runs and is_view(node) and (inputs := node.all_input_nodes):
        node = inputs[0]
    return node


def _sources(node: Node) -> list[Node]:
    """The nodes whose tensors a node reads, each once."""
    return [source for source in node.all_input_nodes if tensors_of(source.meta.get("val"))]


def _only(found: Iterable[Storage | None]) -> Storage | None:
    return next((storage for storage in found if storage is not None), None)


def _value(node: Node) -> Any:
    return node.meta.get("val")


def _concrete(tensor: Tensor) -> Tensor:
    """The same shape in numbers."""
    return torch.empty([size_hint(size) for size in tensor.shape], dtype=tensor.dtype, device="meta")


def _measure(device: torch.device) -> DeviceSpeed:
    on_gpu = device.type != "cpu"
    side, copied, times = (4096, 1 << 28, 4) if on_gpu else (256, 1 << 25, 1)
    # Not zeros: a GPU multiplies them faster than it multiplies numbers.
    numbers = (torch.arange(side * side, device=device, dtype=torch.float32) % 251 / 251 - 0.5).view(side, side)
    speeds = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if on_gpu else (torch.bfloat16, torch.float32):
        matrix = numbers.to(dtype)
        product = torch.empty_like(matrix)
        speeds[dtype] = 2 * side**3 / _time(partial(torch.mm, matrix, matrix, out=product), device, times)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    moved = 2 * copied / _time(partial(target.copy_, source), device, times)
    one = torch.zeros(1, device=device)
    return DeviceSpeed(speeds, moved, _time(partial(one.add_, 1), device, 200))


@torch.no_grad()
def _time(work: Callable[[], object], device: torch.device, repetitions: int) -> float:
    seconds = []
    for _ in range(4):  # the first time, libraries load; later ones, something else may be running
        begun = perf_counter()
        for _ in range(repetitions):
            work()
        _finish(device)
        seconds.append(perf_counter() - begun)
    return max(min(seconds), 1e-9) / repetitions


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
