"""An executor that is the last to hold a process group lets go of it."""

import gc
import weakref

import torch
import torch.distributed as dist

from lightning_zero.engine import Engine
from tests.ranks.pool import Ranks


def drop_with_a_collective_under_way() -> bool:
    """Whether the engine is gone."""
    engine = Engine(torch.device("cpu"))
    group = engine.mesh.gather_group
    if engine.rank == 0:  # of which the other rank hears nothing
        dist.all_reduce(torch.ones(1 << 16), group=group, async_op=True)
    engine.close()
    dist.destroy_process_group(group)
    dist.barrier()
    gone = weakref.ref(engine)
    del engine, group
    gc.collect()
    return gone() is None


def test_a_collective_that_never_comes_does_not_hold_python_up(ranks: Ranks) -> None:
    """The group's threads drop a tensor that Python made, for which they need Python's lock, while whoever drops the
    group waits for them."""
    assert ranks.run(2, drop_with_a_collective_under_way, deadline=30) == [True, True]
