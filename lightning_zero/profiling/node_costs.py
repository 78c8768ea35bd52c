"""Estimate the cost of each node of a graph: operations, bytes moved, and seconds on a device.

The estimate is simple: it compares places for a transfer and does not predict a step's time.

* Operations follow torch's formulas (``torch.utils.flop_counter``); an op without a formula has none.
* Consecutive elementwise ops, reductions and constants count as one fused kernel, which reads its inputs and writes its
  outputs once. Inductor fuses less in places.
* A view costs nothing, a gather its launch, and a gradient a copy into its bucket.
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
from lightning_zero.compat.tensors import TorchDispatchMode, tree_map_only
from lightning_zero.native.ops import find_op
from lightning_zero.profiling.graph_tensors import (
    Storage,
    aliases_input,
    called_op,
    is_view,
    nbytes,
    nodes_where,
    read_bytes,
    size_hint,
    storages,
    tensors_of,
    view_base,
)

_aten = torch.ops.aten
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Ratio of the speeds of fp8 and bfloat16 products, measured on one H200: 1517 and 805 TFLOP/s at 8192.
FP8_SPEEDUP = 1.88
_FUSED_TAGS = {torch.Tag.pointwise, torch.Tag.reduction}
# Ops that fuse although torch does not tag them.
_FUSED_OPS = {ops.to_copy, _aten.gather.default}


@dataclass(frozen=True)
class DeviceSpeed:
    """Measured or nominal speed of a device.

    Attributes:
        flops_per_s: floating-point operations per second in a matrix product, by dtype.
        bytes_per_s: bytes read or written per second, in a copy.
        launch_s: seconds of a kernel launch.
    """

    flops_per_s: Mapping[torch.dtype, float]
    bytes_per_s: float
    launch_s: float

    @classmethod
    def of(cls, device: torch.device) -> DeviceSpeed:
        """Measure a device, in less than a second and without random numbers."""
        return _measure(device)

    def flops(self, dtype: torch.dtype) -> float:
        """Return the operations per second of a dtype; the slowest measured one for an unknown dtype."""
        if dtype in FP8_DTYPES:
            return FP8_SPEEDUP * self.flops(torch.bfloat16)
        return self.flops_per_s.get(dtype) or min(self.flops_per_s.values())

    def seconds(self, flops: int, moved: int, dtype: torch.dtype, launches: int = 1) -> float:
        """Return the seconds of a kernel that computes and moves bytes at the same time."""
        return max(flops / self.flops(dtype) if flops else 0.0, moved / self.bytes_per_s) + launches * self.launch_s


class NodeCost(NamedTuple):
    """Cost of one node; ``read`` and ``written`` are bytes."""

    name: str
    flops: int = 0
    read: int = 0
    written: int = 0
    seconds: float = 0.0


def graph_costs(graph: Graph, speed: DeviceSpeed) -> list[NodeCost]:
    """Return the cost of every node, in the graph's order; inputs, views and the output cost nothing."""
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
    """Counts floating-point operations of nodes, once for equal nodes as equal layers have them."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, str], int] = {}

    def of(self, node: Node) -> int:
        """Return the operations of a node, see :func:`node_flops`."""
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
    """Return the floating-point operations of a node by torch's formula for its op; 0 without one."""
    op, given = called_op(node)
    if _formula(op) is None:
        return 0
    # Formulas compare sizes. Comparing symbolic sizes would add a guard.
    args, kwargs, value = tree_map_only(
        Tensor, _concrete, (*map_arg((given, dict(node.kwargs)), _value), node.meta.get("val"))
    )
    kwargs = {name: value for name, value in kwargs.items() if op is node.target or name != "rng_state"}
    return op_flops(op, args, kwargs, value)


def op_flops(op: Any, args: Any, kwargs: Any, value: Any) -> int:
    """Return the floating-point operations of one call of an op that returned ``value``."""
    formula = _formula(op)
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=value))
    except Exception:  # an unsuitable formula must fail neither a compilation nor a step
        return 0


def _formula(op: Any) -> Callable[..., Any] | None:
    packet = op.overloadpacket if isinstance(op, ops.OpOverload) else op
    formula = flop_registry.get(packet)
    if formula is None and isinstance(op, ops.OpOverload):
        # torch up to 2.14 has no formula for attention on the CPU, which takes the same arguments.
        name = packet.__name__.replace("attention_for_cpu", "attention")
        formula = flop_registry.get(getattr(_aten, name, None)) if name != packet.__name__ else None
    return formula


def _alone(node: Node, held: dict[Node, tuple[Storage | None, ...]], speed: DeviceSpeed, found: FlopCache) -> NodeCost:
    kind = _transfer(node)
    if kind == "gather":
        return NodeCost(node.name, seconds=speed.launch_s)
    sources = _sources(node)
    value = node.meta.get("val")
    if kind == "reduce":
        read = written = nbytes(map_arg(node.args[0], _value))  # the gradients, without the shards
    else:
        read = sum(read_bytes(source, _only(held[source])) for source in sources)
        written = nbytes(value)
    flops = found.of(node)
    dtypes = [tensor.dtype for source in sources for tensor in tensors_of(source.meta.get("val"))]
    dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    return NodeCost(node.name, flops, read, written, speed.seconds(flops, read + written, dtype))


def fusion_groups(graph: Graph) -> dict[Node, int]:
    """Return for each fused node the number of its kernel."""
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
    """Return the bytes of an input that a kernel reads and has not read yet."""
    storage = _only(held[source])
    if storage is None or runs.get(_maker(source, runs)) == run:
        return 0
    before = entered.get((run, storage), 0)
    now = entered[run, storage] = min(before + read_bytes(source, storage), storage.nbytes)
    return now - before


def _leaves(node: Node, run: int, runs: dict[Node, int]) -> bool:
    """Return True if another kernel reads the node's result."""
    pending = [node]
    for made in pending:  # the list grows
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
    """Return the nodes whose tensors a node reads, each once."""
    return [source for source in node.all_input_nodes if tensors_of(source.meta.get("val"))]


def _only(found: Iterable[Storage | None]) -> Storage | None:
    return next((storage for storage in found if storage is not None), None)


def _value(node: Node) -> Any:
    return node.meta.get("val")


def _concrete(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same shape in numbers."""
    return torch.empty([size_hint(size) for size in tensor.shape], dtype=tensor.dtype, device="meta")


def _measure(device: torch.device) -> DeviceSpeed:
    on_gpu = device.type != "cpu"
    side, copied, times = (4096, 1 << 28, 4) if on_gpu else (256, 1 << 25, 1)
    # GPUs multiply zeros faster than other numbers.
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
    for _ in range(4):  # libraries load in the first run, and other processes may disturb later ones
        begun = perf_counter()
        for _ in range(repetitions):
            work()
        _finish(device)
        seconds.append(perf_counter() - begun)
    return max(min(seconds), 1e-9) / repetitions


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class FlopCount(TorchDispatchMode):
    """Count the operations of eager code while the mode is active, also on autograd's threads.

    ``torch.utils.flop_counter.FlopCounterMode`` is not used: a formula that raises would fail the training step there,
    it counts no attention on CPUs, and it puts hooks on all modules, whose calls the engine records in that step.

    Attributes:
        total: operations of this rank so far; a multiplication and an addition are two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += op_flops(func, args, kwargs or {}, result)
        return result
