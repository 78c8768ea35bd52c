"""An executor that is the last owner of a process group releases it."""

import gc
import weakref

import torch
import torch.distributed as dist

from lightning_zero.engine import Engine
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
