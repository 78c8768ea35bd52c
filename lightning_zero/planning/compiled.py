"""Compiled modules on paper: AOTAutograd traces them, torch's own partitioner decides what is saved for backward, with
the tags that the strategy gives it, and what generated code would do to memory is entered into a ledger.

Nothing is generated and nothing runs: a call returns tensors of the right shapes, with a backward that returns others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compat.compiler import (
    aot_function,
    functorch_config,
    inductor_decompositions,
    inductor_partition,
    min_cut_partition,
    report_compiling,
)
from lightning_zero.compat.tensors import FakeTensorMode, no_dispatch_modes, tree_flatten, tree_unflatten
from lightning_zero.compile.budget_sweep.lifetimes import fresh_bytes, graph_peak, leave_narrow
from lightning_zero.compile.budget_sweep.live_values import on_host
from lightning_zero.compile.context import PassContext
from lightning_zero.compile.graph import results
from lightning_zero.compile.partition import partition_joint_graph
from lightning_zero.compile.passes import offload_limits, saved_limits
from lightning_zero.compile.passes.activation_offload import insert_offloads
from lightning_zero.compile.passes.offload import place_offloads
from lightning_zero.compile.recompute_policy import partitioner_settings
from lightning_zero.compile.tagging import tag_activations, tag_gathers
from lightning_zero.compile.uncaptured_memory import Outside
from lightning_zero.planning.ledger import MemoryCounter
from lightning_zero.planning.weights import fake_op, insert_gathers
from lightning_zero.profiling.cost import DeviceSpeed, graph_costs
from lightning_zero.profiling.tensors import storages
from lightning_zero.sharding.layout import extent

__all__ = ["GraphTotals", "FakeCompiler"]


@dataclass
class GraphTotals:
    """What compiled graphs come to.

    Attributes:
        saved: bytes that forward leaves for backward, besides its inputs.
        forward_s: seconds that forward computes; likewise for backward.
        flops: of both.
        gathered: bytes of whole weights that travel to this rank, forward and backward.
        offloaded: bytes that lie on the host between forward and backward.
        reduced: bytes of gradients, in the dtype in which they are computed.
        peaks: the most bytes that each graph takes beyond its inputs, forward first.
    """

    saved: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    flops: int = 0
    gathered: int = 0
    offloaded: int = 0
    reduced: int = 0
    peaks: list[int] = field(default_factory=list)


class FakeCompiler:
    """Compiles calls of modules.

    Args:
        mode: of the fake tensors.
        ledger: in which memory is entered.
        context: of the graphs.
        speed: of the device.
        surround: what there must be around code that is traced.

    Attributes:
        found: of all graphs so far.
        outside: watches what is alive besides.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        ledger: MemoryCounter,
        context: PassContext,
        speed: DeviceSpeed,
        surround: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._mode = mode
        self._ledger = ledger
        self._context = context
        self._speed = speed
        self._surround = surround
        self.found = GraphTotals()
        self.outside = Outside(ledger)

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What ``module(*args, **kwargs)`` returns, compiled."""
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

        compiled = self.outside.watched(self._compiled(traced, len(weights)), lasting=lambda: ())
        given_back = iter(compiled(weights, buffers, *tensors))
        returned, others = shape
        return tree_unflatten([next(given_back) if leaf is None else leaf for leaf in others], returned)

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
            self._leave(forward, backward, num_fwd_outputs)
            return forward, backward

        compiled = aot_function(
            function,
            fw_compiler=lambda module, inputs: self._forward(module, weights),
            bw_compiler=lambda module, inputs: self._backward(module, weights),
            partition_fn=partition,
            decompositions=inductor_decompositions() if generates else None,
        )

        def run(*args: Any) -> Any:
            settings = functorch_config.patch(partitioner_settings(budget) | {"force_non_lazy_backward_lowering": True})
            with settings, no_dispatch_modes(), self._mode:
                return compiled(*args)

        return run

    def _leave(self, forward: GraphModule, backward: GraphModule, outputs: int) -> None:
        limits = offload_limits(self._context)
        if limits is not None:
            if limits.budget_bytes is not None:  # which is for all graphs together
                limits = replace(limits, budget_bytes=max(limits.budget_bytes - self.found.offloaded, 0.0))
            self.found.offloaded += insert_offloads(forward.graph, backward.graph, outputs, limits, fake_op)
            place_offloads(forward.graph, limits.host, fake_op)

    def _forward(self, module: GraphModule, weights: int) -> Any:
        graph = module.graph
        peak = self._enter(graph, set(), 0)
        self.found.saved += fresh_bytes(graph)
        self.found.forward_s += self._seconds(graph)

        def run(args: list[Any]) -> list[Any]:
            self._ledger.spike(peak)
            with no_dispatch_modes(), self._mode:
                made = _results(graph, args)
            args.clear()
            away = on_host(graph)
            self._ledger.adopt([value for node, value in zip(results(graph), made, strict=True) if node not in away])
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
        peak = self._enter(graph, saved - on_host(graph), weights)
        self.found.reduced += sum(_bytes(node) for node in results(graph)[:weights])
        self.found.backward_s += self._seconds(graph)

        def run(args: list[Any]) -> list[Any]:
            self._ledger.spike(peak)
            with no_dispatch_modes(), self._mode:
                made = [None if v is None else torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values]
            args.clear()
            self._ledger.adopt(made[weights:])
            return made

        return _boxed(run)

    def _enter(self, graph: Graph, saved: set[Node], gradients: int) -> int:
        fuses = self._context.config.backend != "aot_eager"
        peak = graph_peak(graph, self._context, saved, gradients, fuses)
        self.found.peaks.append(peak)
        return peak

    def _seconds(self, graph: Graph) -> float:
        costs = graph_costs(graph, self._speed)
        self.found.flops += sum(cost.flops for cost in costs)
        return sum(cost.seconds for cost in costs)


def _boxed(run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _bytes(node: Any) -> int:
    return node.meta["val"].nbytes if isinstance(node, Node) else 0


def _results(graph: Graph, args: Sequence[Any]) -> list[Any]:
    """Tensors as the graph would return them: inputs are themselves, and what shares memory does."""
    held = storages(graph)
    given = dict(zip(graph.find_nodes(op="placeholder"), args, strict=True))
    memory = {storage: arg for node, arg in given.items() for storage in held[node] if storage is not None}
    made: list[Any] = []
    for node in results(graph):
        value = node.meta["val"] if isinstance(node, Node) else node
        if not isinstance(value, Tensor) or node in given:
            made.append(given.get(node, value))
            continue
        storage = held[node][0]
        assert storage is not None
        base = memory.get(storage)
        if base is None or base.dtype != value.dtype:
            count = max(storage.nbytes // value.dtype.itemsize, _reach(value))
            base = memory[storage] = torch.empty(count, dtype=value.dtype)
        made.append(base.as_strided(value.shape, value.stride(), value.storage_offset()))
    return made


def _reach(value: Tensor) -> int:
    """Elements of the memory that a tensor lies in."""
    return int(value.storage_offset()) + extent(value.shape, value.stride()) if value.numel() else 0
