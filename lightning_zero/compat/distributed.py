"""Process groups, files of torch's distributed checkpoints, and the allocator of CUDA memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.compat.lookup import private

# The store of init_process_group(), through which ranks exchange messages. (torch 2.11+)
default_store = private("torch.distributed.distributed_c10d._get_default_store")

# The file and position of a tensor's chunk in such a checkpoint. (torch 2.11+)
StorageInfo = private("torch.distributed.checkpoint.filesystem._StorageInfo")

# Names a memory format in the metadata of such a checkpoint; safe to unpickle. (torch 2.11+)
MemoryFormat = private("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING")

# Rebuilds a pickled torch.layout, which the metadata also contain. (torch 2.11+)
get_layout = private("torch.serialization._get_layout")

# Builds of torch without CUDA may lack the following.

# Has this thread allocate from a pool, such as that of later captures. (torch 2.11+)
begin_allocate_to_pool: Any = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)

# Ends that, also after a failed capture, which leaves it on. (torch 2.11+)
end_allocate_to_pool: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)

# Releases the pool of a failed capture, and the reference that begin_allocate_to_pool holds. (torch 2.11+)
release_pool: Any = getattr(torch._C, "_cuda_releasePool", None)

# Frees the workspaces of cuBLAS, one per stream, which outlive a CUDA graph. (torch 2.11+)
clear_cublas_workspaces: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)

# Keeps a device busy for some cycles, to simulate a slow rank. (torch 2.11+)
sleep = private("torch.cuda._sleep")


@contextmanager
def connect_lazily() -> Iterator[None]:
    """Have process groups that are made inside connect with their first collective.

    If the world's group is bound to a device, a new group splits its communicator and takes device memory at once.
    (torch 2.11+)
    """
    world = dist.group.WORLD
    assert world is not None
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def all_gather_into() -> Callable[..., Any]:
    """Return ``all_gather(full, shard, group=...)``. Torch 2.13 renames it and deprecates the old name."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
