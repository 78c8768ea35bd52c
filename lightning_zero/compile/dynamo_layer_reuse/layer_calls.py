"""Calls of modules while Dynamo traces: records traces of layers, and reuses them for equal layers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import DisableTorchFunctionSubclass, nn
from torch.fx import Graph, Node

from lightning_zero.compat.dynamo import LAYER_REUSE, has_global_hooks
from lightning_zero.compile.dynamo_layer_reuse.layer_copy import LayerNodes, copy_layer
from lightning_zero.compile.dynamo_layer_reuse.trace_guards import TraceGuards, check_built_alike
from lightning_zero.compile.dynamo_layer_reuse.trace_inputs import (
    CallSignature,
    ReuseRejected,
    TracerState,
    is_written_to,
)
from lightning_zero.compile.dynamo_layer_reuse.traced_code import watch_foreign_values, watch_identity_checks
from lightning_zero.compile.events import OPTIMIZATION_COUNTS

log = logging.getLogger(__name__)

# Traces kept of a class. T5's encoder and decoder have one class, and the first layer of each has a bias of its own.
# The first reader of a frozen embedding gets no gradient. Models with more kinds gain little.
MAX_TRACES = 4
# Rejected layers of a class and graph before all others are traced: a layer that reads its number differs from all.
MAX_REJECTED = 4


@LAYER_REUSE
@contextmanager
def reuse_layer_traces() -> Iterator[None]:
    """Reuse traces of layers in compilations of this thread. Other threads are not affected."""
    calls, mine = _Calls(), threading.get_ident()

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if threading.get_ident() != mine:
                return plain(variable, tx, args, kwargs)
            return calls.call(plain, variable, tx, args, kwargs)

        return call_function

    with LAYER_REUSE.replace({"NNModuleVariable.call_function": make}):
        yield


class _Trace:
    """The trace of one call, valid while the graph is being made."""

    def __init__(self, variable: Any, tx: Any, signature: CallSignature, state: TracerState) -> None:
        self._variable = variable
        self._signature = signature
        self._state = state
        self._last = _last_node(tx.output.graph)
        self._nodes: LayerNodes | None = None
        self._guards: TraceGuards | None = None

    def end(self, tx: Any, result: Any, identity_checks: Sequence[str], foreign_values: Sequence[str]) -> bool:
        """Return True if the trace can be reused.

        Args:
            identity_checks: comparisons of objects by identity in the traced code.
        """
        try:
            if identity_checks:
                raise ReuseRejected(f"it compares objects by identity ({identity_checks[0]})")
            if foreign_values:
                raise ReuseRejected(f"it reads values that are not its own ({foreign_values[0]})")
            if self._state != TracerState.read(tx):
                raise ReuseRejected("it has side effects")
            self._nodes = LayerNodes.collect(_calls_after(tx.output.graph, self._last), result, self._signature)
        except ReuseRejected as why:
            log.debug("Trace not kept: %s (%s)", type(self._variable.value).__name__, why)
        return self._nodes is not None

    def reuse(self, variable: Any, tx: Any, signature: CallSignature, state: TracerState) -> Any:
        """Return the result of a call of another module, as Dynamo's variable.

        Raises:
            ReuseRejected: the module must be traced.
        """
        if self._state != state:
            raise ReuseRejected("the state of the tracer differs")
        signature.check_equal(self._signature)
        check_built_alike(self._variable.value, variable.value)
        if self._guards is None:
            self._guards = TraceGuards(tx, self._variable)
        matched = self._guards.match(tx, variable)
        assert self._nodes is not None
        return copy_layer(tx, self._nodes, matched, self._signature.pair(signature), (self._variable, variable))


class _Calls:
    """Calls of modules in the graphs of one call of compiled code."""

    def __init__(self) -> None:
        self._output: Any = None
        self._traces: dict[type, list[_Trace]] = {}
        self._rejected: dict[type, int] = {}

    def call(self, plain: Callable[..., Any], variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not _is_candidate(variable, tx):
            return plain(variable, tx, args, kwargs)
        self._start_graph(tx.output)
        kind = type(variable.value)
        traces = self._traces.setdefault(kind, [])
        try:
            signature, state = CallSignature.read(args, kwargs), TracerState.read(tx)
            if is_written_to(variable.value, state.objects):
                raise ReuseRejected("it was written to")
        except ReuseRejected as why:
            log.debug("Layer traced: %s (%s)", kind.__name__, why)
            return plain(variable, tx, args, kwargs)
        for trace in traces if self._rejected.get(kind, 0) < MAX_REJECTED else ():
            last = _last_node(tx.output.graph)
            try:
                with DisableTorchFunctionSubclass():  # or each read of a size would call a shard's class
                    result = trace.reuse(variable, tx, signature, state)
                OPTIMIZATION_COUNTS["layers stamped"] += 1
                return result
            except Exception as why:  # after any error the layer can still be traced
                log.debug("Layer traced: %s (%s: %s)", kind.__name__, type(why).__name__, why)
                for node in reversed(_calls_after(tx.output.graph, last)):
                    tx.output.graph.erase_node(node)
        if traces:
            self._rejected[kind] = self._rejected.get(kind, 0) + 1
        if len(traces) >= MAX_TRACES:
            return plain(variable, tx, args, kwargs)
        trace = _Trace(variable, tx, signature, state)
        # Dynamo holds its compile lock here, so no other thread traces under these patches.
        with watch_identity_checks() as identity_checks, watch_foreign_values(variable.source) as foreign_values:
            result = plain(variable, tx, args, kwargs)
        OPTIMIZATION_COUNTS["layers traced"] += 1
        if trace.end(tx, result, identity_checks, foreign_values):
            traces.append(trace)
        return result

    def _start_graph(self, output: Any) -> None:
        if output is not self._output:  # a restarted graph has none of the earlier nodes
            self._output = output
            self._traces.clear()
            self._rejected.clear()


def _last_node(graph: Graph) -> Node | None:
    return next(iter(reversed(graph.nodes)), None)


def _calls_after(graph: Graph, last: Node | None) -> list[Node]:
    """Return the nodes after ``last``, in order, without placeholders."""
    found = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        if node.op != "placeholder":
            found.append(node)
    return found[::-1]


def _is_candidate(variable: Any, tx: Any) -> bool:
    """Return True for a module with children that is called outside of checkpointed regions."""
    output = tx.output
    in_graph = output.current_tracer is output.root_tracer and not output.export and not has_global_hooks()
    module = variable.value
    return in_graph and variable.source is not None and isinstance(module, nn.Module) and bool(module._modules)
