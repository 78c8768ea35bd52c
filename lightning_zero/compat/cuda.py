"""The allocator of CUDA memory, cuBLAS and device clocks. Builds of torch without CUDA may lack these."""

from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.lookup import private

# Ends that, also after a failed capture, which leaves it on. (torch 2.11+)
end_allocate_to_pool: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)

# Releases the pool of a failed capture. (torch 2.11+)
release_pool: Any = getattr(torch._C, "_cuda_releasePool", None)

# Frees the workspaces of cuBLAS, one per stream, which outlive a CUDA graph. (torch 2.11+)
clear_cublas_workspaces: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)

# Keeps a device busy for some cycles, to simulate a slow rank. (torch 2.11+)
sleep = private("torch.cuda._sleep")

# Makes a storage of memory that others own. (torch 2.11+)
_storage_at = private("torch._C._construct_storage_from_data_pointer")


def without_owner(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory, which may be freed and reused while the result exists."""
    storage = tensor.untyped_storage()
    other = _storage_at(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(other, tensor.storage_offset(), tensor.shape, tensor.stride())
