"""Compile modules on fake tensors: trace, partition and count, without generating or running code.

AOTAutograd traces a module and torch's partitioner decides what is saved for backward, with the strategy's tags. A call
returns fake tensors of the right shapes whose backward returns others, and adds the graphs' memory to a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from functorch.compile import aot_function
from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition as min_cut_partition
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.compiler import inductor_decompositions, inductor_partition, report_compiling
from lightning_zero.compat.tensors import FakeTensorMode, OpOverload, no_dispatch_modes, tree_flatten, tree_unflatten
from lightning_zero.compile.context import PassContext
from lightning_zero.compile.fx_utils import results
from lightning_zero.compile.partitioner.partition import partition_joint_graph, tag_activations, tag_gathers
from lightning_zero.compile.partitioner.recompute_policy import partitioner_settings
from lightning_zero.compile.passes import offload_limits, saved_limits
from lightning_zero.compile.passes.activation_offload import insert_offloads, place_offloads
from lightning_zero.native.ops import FAKE_NAMESPACE
from lightning_zero.planning.graph_memory import fresh_bytes, graph_peak, host_activations, leave_narrow
from lightning_zero.planning.memory_counter import MemoryCounter
from lightning_zero.profiling.graph_tensors import storages
from lightning_zero.profiling.node_costs import DeviceSpeed, graph_costs
from lightning_zero.sharding.layout import extent

# Ops that stand for the executor's.
_LIBRARY = torch.library.Library(FAKE_NAMESPACE, "DEF")
_LIBRARY.define("gather(Tensor shard, int[] shape, ScalarType dtype) -> Tensor")
for _name in ("offload", "offload_start"):
    _LIBRARY.define(f"{_name}(Tensor value, Tensor shard) -> Tensor")
for _name in ("reload", "reload_start"):
    _LIBRARY.define(f"{_name}(Tensor host, Tensor shard) -> Tensor")
_LIBRARY.define("offload_wait(Tensor value, Tensor host, Tensor shard) -> ()")
_LIBRARY.define("reload_wait(Tensor(a) value, Tensor host, Tensor shard) -> Tensor(a)")


@dataclass
class GraphTotals:
    """Sums over all compiled graphs.

    Attributes:
        saved: bytes that forward leaves for backward, besides its inputs.
        forward_s: compute seconds of forward.
        backward_s: compute seconds of backward.
        flops: operations of both.
        offloaded: bytes on the host between forward and backward.
        reduced: bytes of gradients, in their computed dtype.
        peaks: peak bytes of each graph beyond its inputs, forward first.
    """

    saved: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    flops: int = 0
    offloaded: int = 0
    reduced: int = 0
    peaks: list[int] = field(default_factory=list)


class FakeCompiler:
    """Compiles calls of modules on fake tensors.

    Attributes:
        found: totals of all graphs so far.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        counter: MemoryCounter,
        context: PassContext,
        speed: DeviceSpeed,
        surround: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._mode = mode
        self._counter = counter
        self._context = context
        self._speed = speed
        self._surround = surround
        self.found = GraphTotals()

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the result of ``module(*args, **kwargs)``, compiled."""
        weights = dict(module.named_parameters())
        buffers = dict(module.named_buffers())
        given, spec = tree_flatten((args, kwargs))
        tensors = [value for value in given if isinstance(value, Tensor)]
        shape: list[Any] = []

        def traced(weights: dict[str, Tensor], buffers: dict[str, Tensor], *tensors: Tensor) -> list[Tensor]:
            arriving = iter(tensors)
            values = [next(arriving) if isinstance(value, Tensor) else value for value in given]
            args, kwargs = tree_unflatten(values, spec)
            with self._surround(), report_compiling():
                result = functional_call(module, (weights, buffers), args, kwargs)
            leaves, returned = tree_flatten(result)
            shape[:] = [returned, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]]
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        outputs = iter(self._compiled(traced, len(weights))(weights, buffers, *tensors))
        returned, others = shape
        return tree_unflatten([next(outputs) if leaf is None else leaf for leaf in others], returned)

    def _compiled(self, function: Callable[..., Any], weights: int) -> Callable[..., Any]:
        generates = self._context.config.backend != "aot_eager"
        budget = self._context.config.activation_memory_budget

        def partition(module: GraphModule, inputs: Any, *, num_fwd_outputs: int, **settings: Any) -> Any:
            insert_gathers(module.graph, weights)
            tag_gathers(module.graph, saved_limits(self._context))
            if self._context.config.recompute is not None:
                tag_activations(module.graph, self._context.config.recompute)
            by = inductor_partition if generates else min_cut_partition
            forward, backward, _ = partition_joint_graph(module, inputs, num_fwd_outputs, budget, by, **settings)
            self._offload(forward, backward, num_fwd_outputs)
            return forward, backward

        compiled = aot_function(
            function,
            fw_compiler=lambda module, inputs: self._forward(module),
            bw_compiler=lambda module, inputs: self._backward(module, weights),
            partition_fn=partition,
            decompositions=inductor_decompositions() if generates else None,
        )

        def run(*args: Any) -> Any:
            settings = functorch_config.patch(partitioner_settings(budget) | {"force_non_lazy_backward_lowering": True})
            with settings, no_dispatch_modes(), self._mode:
                return compiled(*args)

        return run

    def _offload(self, forward: GraphModule, backward: GraphModule, outputs: int) -> None:
        limits = offload_limits(self._context)
        if limits is not None:
            if limits.budget_bytes is not None:  # shared by all graphs
                limits = replace(limits, budget_bytes=max(limits.budget_bytes - self.found.offloaded, 0.0))
            self.found.offloaded += insert_offloads(forward.graph, backward.graph, outputs, limits, fake_op)
            place_offloads(forward.graph, limits.host, fake_op)

    def _forward(self, module: GraphModule) -> Any:
        graph = module.graph
        peak = self._peak(graph, set(), 0)
        self.found.saved += fresh_bytes(graph)
        self.found.forward_s += self._seconds(graph)

        def run(args: list[Any]) -> list[Any]:
            self._counter.add_temporary(peak)
            with no_dispatch_modes(), self._mode:
                made = _make_results(graph, args)
            args.clear()
            on_host = host_activations(graph)
            values = zip(results(graph), made, strict=True)
            self._counter.add([value for node, value in values if node not in on_host])
            return made

        return _boxed(run)

    def _backward(self, module: GraphModule, weights: int) -> Any:
        graph = module.graph
        inputs = graph.find_nodes(op="placeholder")
        saved = {node for node in inputs if not node.name.startswith("primals")}
        values = [node.meta["val"] if isinstance(node, Node) else None for node in results(graph)]
        leave_narrow(graph, weights)
        limits = offload_limits(self._context)
        if limits is not None:
            place_offloads(graph, limits.host, fake_op)
        peak = self._peak(graph, saved - host_activations(graph), weights)
        self.found.reduced += sum(_bytes(node) for node in results(graph)[:weights])
        self.found.backward_s += self._seconds(graph)

        def run(args: list[Any]) -> list[Any]:
            self._counter.add_temporary(peak)
            with no_dispatch_modes(), self._mode:
                made = [None if v is None else torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values]
            args.clear()
            self._counter.add(made[weights:])
            return made

        return _boxed(run)

    def _peak(self, graph: Graph, saved: set[Node], gradients: int) -> int:
        fuses = self._context.config.backend != "aot_eager"
        peak = graph_peak(graph, self._context, saved, gradients, fuses)
        self.found.peaks.append(peak)
        return peak

    def _seconds(self, graph: Graph) -> float:
        costs = graph_costs(graph, self._speed)
        self.found.flops += sum(cost.flops for cost in costs)
        return sum(cost.seconds for cost in costs)


def fake_op(name: str) -> OpOverload:
    """Return the op that stands for the executor's op ``name``."""
    return getattr(getattr(torch.ops, FAKE_NAMESPACE), name).default


def insert_gathers(graph: Graph, count: int) -> None:
    """Gather the first ``count`` inputs of a joint graph, its parameters, in place."""
    for shard in graph.find_nodes(op="placeholder")[:count]:
        value = shard.meta.get("val")
        if not isinstance(value, Tensor) or not shard.users:
            continue
        users = list(shard.users)
        wanted = set(users)
        first = users[0] if len(users) == 1 else next(node for node in graph.nodes if node in wanted)
        with graph.inserting_before(first):
            full = graph.call_function(fake_op("gather"), (shard, list(value.shape), value.dtype))
        full.meta = {key: one for key, one in shard.meta.items() if key in ("val", "tensor_meta")}
        for user in users:
            user.replace_input_with(shard, full)


def _boxed(run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _bytes(node: Any) -> int:
    return node.meta["val"].nbytes if isinstance(node, Node) else 0


def _make_results(graph: Graph, args: Sequence[Any]) -> list[Any]:
    """Return tensors like the graph's results, with the same sharing of memory."""
    found = storages(graph)
    given = dict(zip(graph.find_nodes(op="placeholder"), args, strict=True))
    memory = {storage: arg for node, arg in given.items() for storage in found[node] if storage is not None}
    made: list[Any] = []
    for node in results(graph):
        value = node.meta["val"] if isinstance(node, Node) else node
        if not isinstance(value, Tensor) or node in given:
            made.append(given.get(node, value))
            continue
        storage = found[node][0]
        assert storage is not None
        base = memory.get(storage)
        if base is None or base.dtype != value.dtype:
            end = int(value.storage_offset()) + extent(value.shape, value.stride()) if value.numel() else 0
            count = max(storage.nbytes // value.dtype.itemsize, end)
            base = memory[storage] = torch.empty(count, dtype=value.dtype)
        made.append(base.as_strided(value.shape, value.stride(), value.storage_offset()))
    return made
