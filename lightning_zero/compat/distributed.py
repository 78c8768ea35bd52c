"""Process groups, and files of torch's distributed checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_zero.compat.lookup import private

# The store that init_process_group() made, over which ranks can say something to each other. (torch 2.11+)
default_store = private("torch.distributed.distributed_c10d._get_default_store")

# Where in which file a piece of a tensor lies: what readers of such a checkpoint look for. (torch 2.11+)
StorageInfo = private("torch.distributed.checkpoint.filesystem._StorageInfo")

# How the metadata of such a checkpoint name a memory format: harmless to unpickle. (torch 2.11+)
MemoryFormat = private("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING")

# What a pickled torch.layout, which stands there, too, is made by. (torch 2.11+)
get_layout = private("torch.serialization._get_layout")


@contextmanager
def connect_lazily() -> Iterator[None]:
    """Process groups made inside connect with their first collective. Otherwise each takes memory of the device at once
    if the world's group was made for that device: it splits that one's communicator. (torch 2.11+)"""
    world = dist.group.WORLD
    assert world is not None
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def all_gather_into() -> Callable[..., Any]:
    """``all_gather(whole, mine, group=...)``: torch 2.13 calls it by another name, and warns of that in torch 2.11."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
