"""Cuts a joint graph under each budget of activations, and says what a pass would take at its peak."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from torch.fx import Graph, GraphModule

from lightning_zero.budget.curve import CHARTED, Point
from lightning_zero.compat.compiler import functorch_config
from lightning_zero.compat.graphs import TANGENTS
from lightning_zero.compile.budget_sweep.lifetimes import fresh_bytes, graph_peak
from lightning_zero.compile.context import PassContext
from lightning_zero.compile.fx_utils import output_node
from lightning_zero.compile.partitioner.partition import partition_joint_graph
from lightning_zero.compile.passes.reduce_groups import enqueue_gradients
from lightning_zero.compile.partitioner.recompute_policy import partitioner_settings
from lightning_zero.profiling.tensors import nbytes

__all__ = ["chart", "point"]

log = logging.getLogger(__name__)


def chart(module: GraphModule, inputs: Any, outputs: int, context: PassContext, **settings: Any) -> tuple[Point, ...]:
    """Of a joint graph that is going to be partitioned, and stays as it is, under each of the budgets, the smallest
    first. Nothing leaves for the host. Empty where torch cannot partition it under some of them, or there is something
    in it that nobody here has thought of: a plan does without, and a compilation must not end for one.

    Args:
        outputs: of forward, which the user, or autograd, gets.
        settings: for torch's partitioner.
    """
    try:
        copy = _Unwritten(module, _copied(module.graph))
        with nullcontext():
            return tuple(_points(copy, inputs, outputs, context, settings))[::-1]
    except (AssertionError, RuntimeError) as error:  # which is no matter unless it is so under the budget in force, too
        log.info("What budgets of activations come to is not reckoned: %s: %s", type(error).__name__, error)
    except Exception as error:
        log.warning(
            "What budgets of activations come to could not be reckoned (%s: %s); plans go by a rule of thumb. "
            "Training goes on; please report the model.",
            type(error).__name__,
            error,
        )
    return ()


def _points(
    joint: GraphModule, inputs: Any, outputs: int, context: PassContext, settings: dict[str, Any]
) -> Iterator[Point]:
    # Torch's own count of operations, which runs them, is nothing that decides here.
    settled: dict[str, Any] = {"activation_memory_budget_runtime_estimator": "testing"}
    for budget in reversed(CHARTED):  # where all may be saved, some nodes lack a tag that they have from then on
        with functorch_config.patch(partitioner_settings(budget) | settled):
            forward, backward, _ = partition_joint_graph(joint, inputs, outputs, budget, **settings)
        settled["cse"] = False  # equal nodes are one by now, and others would be other nodes
        yield point(forward.graph, backward.graph, context, budget)


def _copied(graph: Graph) -> Graph:
    """Without how it is called, which nobody does: when that is copied, torch warns of what it does itself."""
    copy = Graph()
    copy.output(copy.graph_copy(graph, {})).meta = dict(output_node(graph).meta)
    return copy


class _Unwritten(GraphModule):
    """That nobody runs, so that it need not be written as code whenever it changes."""

    def recompile(self) -> Any:
        """Does nothing."""


def point(forward: Graph, backward: Graph, context: PassContext, budget: float) -> Point:
    """Of two halves, which are not to be used any more."""
    fuses, saved = context.config.backend != "aot_eager", fresh_bytes(forward)
    enqueue_gradients(backward)
    inputs = backward.find_nodes(op="placeholder")
    given = [node for node in inputs if not node.name.startswith("primals")]
    begin = saved + sum(nbytes(node.meta.get("val")) for node in given if node.name.startswith(TANGENTS))
    peaks = graph_peak(forward, context, set(), 0, fuses), begin + graph_peak(backward, context, {*given}, 0, fuses)
    return Point(budget, saved, max(peaks))
