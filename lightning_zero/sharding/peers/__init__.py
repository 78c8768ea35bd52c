"""What ranks copy out of, and into, each other's memory."""

from lightning_zero.sharding.peers.memory import PeerMemory
from lightning_zero.sharding.peers.peers import Peers

__all__ = ["PeerMemory", "Peers"]
