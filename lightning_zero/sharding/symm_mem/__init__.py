"""What ranks copy out of, and into, each other's memory."""

from lightning_zero.sharding.symm_mem.memory import PeerMemory
from lightning_zero.sharding.symm_mem.symmetric import Peers

__all__ = ["PeerMemory", "Peers"]
