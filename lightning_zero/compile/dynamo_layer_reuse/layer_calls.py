"""Calls of modules while Dynamo traces: which are kept for others, and which are stamped out of one of these."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import Graph, Node

from lightning_zero.compat.dynamo import LAYERS_ONCE, ModuleVariable, hooks_of_all_modules
from lightning_zero.compat.patches import swap_attribute
from lightning_zero.compat.tensors import DisableTorchFunctionSubclass
from lightning_zero.compile.events import OPTIMIZATION_COUNTS
from lightning_zero.compile.dynamo_layer_reuse.call_signature import Given
from lightning_zero.compile.dynamo_layer_reuse.identity import asked_for_identity
from lightning_zero.compile.dynamo_layer_reuse.reached import reached_elsewhere
from lightning_zero.compile.dynamo_layer_reuse.reuse_rejected import Unlike
from lightning_zero.compile.dynamo_layer_reuse.stamp import Nodes, calls_behind, stamp
from lightning_zero.compile.dynamo_layer_reuse.trace_guards import Known, are_built_alike
from lightning_zero.compile.dynamo_layer_reuse.tracer_state import Around
from lightning_zero.compile.dynamo_layer_reuse.written_attributes import is_written_to

__all__ = ["layers_traced_once"]

log = logging.getLogger(__name__)

# T5's first layer has a bias of its own, and a frozen embedding's first reader gets no gradient: the next is another
# trace. What has more kinds is not worth looking for.
MOST_TRACES = 3
MOST_MISSES = 4  # of a class in a graph; a layer that reads its number differs from all others


@LAYERS_ONCE
@contextmanager
def layers_traced_once() -> Iterator[None]:
    """Inside, what Dynamo traces for the first time, or anew, is traced so."""
    calls = _Calls()
    plain = ModuleVariable.call_function

    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return calls.call(plain, variable, tx, args, kwargs)

    with swap_attribute(ModuleVariable, "call_function", call_function):
        yield


class _Trace:
    """One that has been made of a call, as long as the graph is in the making."""

    def __init__(self, variable: Any, tx: Any, given: Given, around: Around) -> None:
        self._variable = variable
        self._given = given
        self._around = around
        self._last = _last(tx.output.graph)
        self._nodes: Nodes | None = None
        self._known: Known | None = None

    def end(self, tx: Any, result: Any, asked: Sequence[str], reached: Sequence[str]) -> bool:
        """Whether others may be stamped out of it. ``asked``: what in it asks which object something is. ``reached``:
        what it got hold of in a way that would be another one's."""
        try:
            if asked:
                raise Unlike(f"it asks which object something is ({asked[0]})")
            if reached:
                raise Unlike(f"it gets hold of what another would not ({reached[0]})")
            if self._around != Around.of(tx):
                raise Unlike("it has done something beside its nodes")
            self._nodes = Nodes.of(calls_behind(tx.output.graph, self._last), result, self._given)
        except Unlike as why:
            log.debug("A call of %s is not kept: %s", type(self._variable.value).__name__, why)
        return self._nodes is not None

    def again(self, variable: Any, tx: Any, given: Given, around: Around) -> Any:
        """The result of another call.

        Raises:
            Unlike: it is to be traced.
        """
        if self._around != around:
            raise Unlike("something has changed since")
        given.match(self._given)
        are_built_alike(self._variable.value, variable.value)
        if self._known is None:
            self._known = Known(tx, self._variable)
        passed = self._known.moved_to(tx, variable)
        assert self._nodes is not None
        return stamp(tx, self._nodes, passed, self._given.paired(given), (self._variable, variable))


class _Calls:
    """Of what is traced by one call of compiled code."""

    def __init__(self) -> None:
        self._output: Any = None
        self._traces: dict[type, list[_Trace]] = {}
        self._misses: dict[type, int] = {}

    def call(self, plain: Callable[..., Any], variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not _may_repeat(variable, tx):
            return plain(variable, tx, args, kwargs)
        self._look_at(tx.output)
        kind = type(variable.value)
        traces = self._traces.setdefault(kind, [])
        try:
            given, around = Given.of(args, kwargs), Around.of(tx)
            if is_written_to(variable.value, around.objects):
                raise Unlike("it has been written to")
        except Unlike as why:
            log.debug("A call of %s is traced: %s", kind.__name__, why)
            return plain(variable, tx, args, kwargs)
        for trace in traces if self._misses.get(kind, 0) < MOST_MISSES else ():
            last = _last(tx.output.graph)
            try:
                with DisableTorchFunctionSubclass():  # a shard's class would be asked for each size that is read of it
                    result = trace.again(variable, tx, given, around)
                OPTIMIZATION_COUNTS["layers stamped"] += 1
                return result
            except Exception as why:  # whatever it is, the call may well be traced
                log.debug("A call of %s is traced: %s: %s", kind.__name__, type(why).__name__, why)
                for node in reversed(calls_behind(tx.output.graph, last)):
                    tx.output.graph.erase_node(node)
        if traces:
            self._misses[kind] = self._misses.get(kind, 0) + 1
        if len(traces) >= MOST_TRACES:
            return plain(variable, tx, args, kwargs)
        trace = _Trace(variable, tx, given, around)
        with asked_for_identity() as asked, reached_elsewhere(variable.source) as reached:
            result = plain(variable, tx, args, kwargs)
        OPTIMIZATION_COUNTS["layers traced"] += 1
        if trace.end(tx, result, asked, reached):
            traces.append(trace)
        return result

    def _look_at(self, output: Any) -> None:
        if output is not self._output:  # a graph that is begun anew has none of the nodes of the one before
            self._output = output
            self._traces.clear()
            self._misses.clear()


def _last(graph: Graph) -> Node | None:
    return next(iter(reversed(graph.nodes)), None)


def _may_repeat(variable: Any, tx: Any) -> bool:
    """Whether it has parts, so that there is something to save, and is called in the graph itself: what a checkpointed
    region runs is a graph of its own."""
    output = tx.output
    in_graph = output.current_tracer is output.root_tracer and not output.export and not hooks_of_all_modules()
    module = variable.value
    return in_graph and variable.source is not None and isinstance(module, nn.Module) and bool(module._modules)
