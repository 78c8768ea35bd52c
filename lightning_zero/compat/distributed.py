"""Process groups, and files of torch's distributed checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
