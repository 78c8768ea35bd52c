"""A joint graph becomes a forward and a backward within a budget of activations: what a compiled graph, one that is
only reckoned with and one on paper have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from lightning_zero.compat.compiler import min_cut_partition
from lightning_zero.compat.fast_partitioner import fast_partitioner
from lightning_zero.compile.passes.mutated_buffers import save_mutated_buffers
from lightning_zero.compile.passes.residual_sums import save_residual_sums
from lightning_zero.compile.recompute_policy import save_random_ops

__all__ = ["partition_joint_graph"]

Partition = Callable[..., tuple[GraphModule, GraphModule]]


def partition_joint_graph(
    module: GraphModule, inputs: Any, outputs: int, budget: float, by: Partition = min_cut_partition, **settings: Any
) -> tuple[GraphModule, GraphModule, list[GraphModule]]:
    """Both, and those of them whose graphs were changed behind torch's partition, so that their code is not theirs.

    Within torch's settings of :func:`~lightning_zero.compile.recompute_policy.partitioner_settings` the same budget.

    Args:
        module: the joint graph, which is not to be used any more.
        outputs: of forward, which the user, or autograd, gets.
        by: of torch's partitioners.
        settings: for it.
    """
    # Here: Inductor's passes over joint graphs have seeds drawn, which no node before them does.
    save_random_ops(module.graph, budget)
    forward, backward = fast_partitioner(by)(module, inputs, num_fwd_outputs=outputs, **settings)
    changed = [forward] if save_mutated_buffers(forward.graph, outputs) else []
    if budget < 1 and save_residual_sums(forward.graph, backward.graph, outputs):
        changed = [forward, backward]
    return forward, backward, changed
