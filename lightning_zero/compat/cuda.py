"""The allocator of CUDA memory, cuBLAS and devices' clocks. Builds of torch without CUDA may lack these."""

from typing import Any

import torch

from lightning_zero.compat.lookup import private

# What this thread allocates from now on comes from a pool, such as that of graphs to come. (torch 2.11+)
begin_allocate_to_pool: Any = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)

# Ends what a capture that failed has begun, in which torch leaves the allocator; and the above. (torch 2.11+)
end_allocate_to_pool: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)

# Gives the pool of a capture that failed back, and the hold on it that the above is. (torch 2.11+)
release_pool: Any = getattr(torch._C, "_cuda_releasePool", None)

# cuBLAS keeps a workspace for each stream for as long as torch lives, and closing a graph would not give its own back.
# (torch 2.11+)
clear_cublas_workspaces: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)

# Keeps a device busy for some cycles: a rank that comes late on purpose, to see whether others wait. (torch 2.11+)
sleep = private("torch.cuda._sleep")
