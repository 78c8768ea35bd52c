"""Exchange weights and gradients by copies between the memory of ranks on one host."""

from lightning_zero.sharding.symm_mem.memory import PeerMemory
from lightning_zero.sharding.symm_mem.symmetric import Peers

__all__ = ["PeerMemory", "Peers"]
