"""Exchange weights and gradients by copies between the memory of ranks on one host."""

from lightning_zero.sharding.symm_mem.symmetric_memory import SymmetricMemory
from lightning_zero.sharding.symm_mem.transports import PeerTransports

__all__ = ["SymmetricMemory", "PeerTransports"]
