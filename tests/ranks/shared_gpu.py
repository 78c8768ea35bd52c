"""Two ranks on one GPU, with TESTS_SHARE_GPU=1.

Each waits for its turn on the device, so it is slow, but copies between ranks, collectives and captured graphs are
those of two GPUs. NCCL takes ranks with different NCCL_HOSTIDs for two hosts and uses a socket; it rejects two ranks on
one device of a host. Lightning also gets hosts with one GPU each. Our code finds one host, by its name.
"""

import os

__all__ = ["environ", "shares_gpu"]


def shares_gpu() -> bool:
    return os.environ.get("TESTS_SHARE_GPU") == "1"


def environ(rank: int, world_size: int) -> dict[str, str]:
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": str(rank),
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(world_size),
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
