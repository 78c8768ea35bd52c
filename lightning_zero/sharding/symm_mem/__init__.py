"""Exchange weights and gradients by copies between the memory of ranks on one host."""

from lightning_zero.sharding.symm_mem.memory import SymmetricMemory
from lightning_zero.sharding.symm_mem.symmetric import PeerTransports

__all__ = ["SymmetricMemory", "PeerTransports"]
