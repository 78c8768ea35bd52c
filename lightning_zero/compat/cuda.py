"""The allocator of CUDA memory, cuBLAS and devices' clocks. Builds of torch without CUDA may lack these."""

from typing import Any

import torch

from lightning_zero.compat.lookup import private

# Ends what a capture that failed has begun, in which torch leaves the allocator. (torch 2.11+)
end_allocate_to_pool: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)

# Gives the pool of a capture that failed back. (torch 2.11+)
release_pool: Any = getattr(torch._C, "_cuda_releasePool", None)

# cuBLAS keeps a workspace for each stream for as long as torch lives, and closing a graph would not give its own back.
# (torch 2.11+)
clear_cublas_workspaces: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)

# Keeps a device busy for some cycles: a rank that comes late on purpose, to see whether others wait. (torch 2.11+)
sleep = private("torch.cuda._sleep")
