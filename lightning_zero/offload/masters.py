"""``offload=("optimizer", "parameters")``: master shards on the host, where that is possible."""

from __future__ import annotations

from lightning_zero.config import EngineConfig
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.offload.memory import HostMemory
from lightning_zero.sharding.away import Away

__all__ = ["masters_away"]


def masters_away(config: EngineConfig, mesh: Mesh) -> Away | None:
    """Which master shards lie on the host; None: none.

    Raises:
        UnsupportedError: they are to, and cannot.
    """
    if "parameters" not in config.offload:
        return None
    if config.compute_dtype is None:
        raise UnsupportedError(
            f"offload={config.offload!r}: with this precision there is nothing besides the weights that the model "
            "could compute with, so they stay on the device. Pass precision='bf16-mixed' or '16-mixed', or leave "
            "'parameters' out."
        )
    if mesh.across is not None:
        raise UnsupportedError(
            f"offload={config.offload!r}: over several hosts ({mesh.host_count} here) master weights stay on the "
            "device. Leave 'parameters' out; each GPU has fewer of them, the more there are."
        )
    return Away(config.compute_dtype, HostMemory(mesh.device).mapped)
