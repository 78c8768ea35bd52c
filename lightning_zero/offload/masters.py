"""``offload=("optimizer", "parameters")``: master shards on the host, where that is possible."""

from __future__ import annotations

from lightning_zero.config import EngineConfig
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.offload.memory import HostMemory
from lightning_zero.sharding.host_policy import HostMasterPolicy

__all__ = ["check_host_masters", "host_master_policy"]


def host_master_policy(config: EngineConfig, mesh: Mesh) -> HostMasterPolicy | None:
    """Which master shards lie on the host; None: none.

    Raises:
        UnsupportedError: they are to, and cannot.
    """
    check_host_masters(config, mesh.shard_host_count)
    if "parameters" not in config.offload or config.compute_dtype is None:
        return None
    return HostMasterPolicy(config.compute_dtype, HostMemory(mesh.device).mapped)


def check_host_masters(config: EngineConfig, hosts: int) -> None:
    """Raises :class:`UnsupportedError` where master shards are to lie on the host, and cannot. ``hosts``: over so many
    each parameter is cut."""
    if "parameters" not in config.offload:
        return
    if config.compute_dtype is None:
        raise UnsupportedError(
            f"offload={config.offload!r}: with this precision there is nothing besides the weights that the model "
            "could compute with, so they stay on the device. Pass precision='bf16-mixed' or '16-mixed', or leave "
            "'parameters' out."
        )
    if hosts > 1:
        raise UnsupportedError(
            f"offload={config.offload!r}: over several hosts ({hosts} here) master weights stay on the "
            "device. Leave 'parameters' out; each GPU has fewer of them, the more there are. With "
            "tuning=Tuning(replicate_over='hosts') they may leave, as on one host."
        )
