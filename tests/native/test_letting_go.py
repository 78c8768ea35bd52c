"""An engine that is closed releases process groups and captured steps."""

import gc
import weakref
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from lightning_zero.engine import Engine
from lightning_zero.optim.step_kernel import StepKernel
from tests.helpers.replays import BY_COLLECTIVE, train
from tests.ranks.pool import Ranks


def drop_with_a_collective_under_way() -> bool:
    """Return True if the engine was destroyed."""
    engine = Engine(torch.device("cpu"))
    group = engine.mesh.gather_group
    if engine.rank == 0:  # unknown to the other rank
        dist.all_reduce(torch.ones(1 << 16), group=group, async_op=True)
    engine.close()
    dist.destroy_process_group(group)
    dist.barrier()
    gone = weakref.ref(engine)
    del engine, group
    gc.collect()
    return gone() is None


def test_a_collective_that_never_comes_does_not_hold_python_up(ranks: Ranks) -> None:
    """The group's threads take the GIL to drop a tensor that Python created, and the owner joins them."""
    assert ranks.run(2, drop_with_a_collective_under_way, deadline=30) == [True, True]


def captured_steps_after_close() -> tuple[int, int]:
    """Return how many captured steps a training made, and how many of them outlived its engine."""
    made: list[weakref.ref[StepKernel]] = []
    plain = StepKernel.__init__

    def record(self: StepKernel, *args: Any) -> None:
        plain(self, *args)
        made.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        with patch.object(StepKernel, "__init__", record):
            train("clipped", "aot_eager", emulate_cuda_graph_step=True, **BY_COLLECTIVE["weights and gradients"])
        return len(made), sum(kernel() is not None for kernel in made)
    finally:
        gc.enable()


def test_captured_steps_are_freed_with_the_engine_and_not_by_the_garbage_collector(ranks: Ranks) -> None:
    made, left = ranks.run(1, captured_steps_after_close, deadline=60)[0]
    assert made > 0
    assert left == 0
