"""The process group that this process has, compared with the one that a Trainer or Fabric asks for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_warn

__all__ = ["check_backend", "check_rank", "check_world_size"]


def check_world_size(api_name: str, devices: int, nodes: int) -> None:
    """Raise if this process is in a process group of another size.

    Args:
        asker: ``"Trainer"`` or ``"Fabric"``.
        devices: Number of processes per node.
        nodes: Number of nodes.

    Raises:
        MisconfigurationException: The sizes differ. Samplers would use the size that was asked for, and collectives
            the size of the group.
    """
    if not dist.is_initialized() or (size := dist.get_world_size()) == devices * nodes:
        return
    asked, fits = _call(api_name, devices, nodes), _call(api_name, size, 1)
    if size % nodes == 0:
        fits = _call(api_name, size // nodes, nodes)
    raise MisconfigurationException(
        f"{asked} asks for a process group of {_ranks(devices * nodes)}, but this process is already in one of "
        f"{_ranks(size)} ({dist.get_backend_config()}), which an earlier Trainer, Fabric or "
        "torch.distributed.init_process_group() has made. A process group keeps its size until its processes end. "
        f"Use {fits} here, or run this training in a script of its own."
    )


def check_rank(api_name: str, rank: int) -> None:
    """Raise if the process group numbers this process otherwise than the cluster environment does."""
    if dist.is_initialized() and dist.get_rank() != rank:
        raise MisconfigurationException(
            f"This process is rank {dist.get_rank()} of its process group, but rank {rank} for the {api_name}'s cluster "
            "environment, so it would train on another rank's data. Call torch.distributed.init_process_group() with "
            f"the rank of the environment (RANK, or NODE_RANK and LOCAL_RANK), or let the {api_name} call it."
        )


def check_backend(api_name: str, asked: str | None, device: torch.device) -> None:
    """Raise if the process group has another backend than the one asked for, or none for ``device``.

    Args:
        asked: ``process_group_backend`` of the strategy.
    """
    if not dist.is_initialized():
        return
    found = dist.get_backend_config()
    has = _by_device(found, device)
    instead = (
        "Call torch.distributed.destroy_process_group() before, on all ranks, or run this training in its own script"
    )
    for kind, backend in _by_device(asked or "", device).items():
        if has.get(kind) != backend:
            raise MisconfigurationException(
                f"The {api_name}'s strategy asks for process_group_backend={asked!r}, but this process is already in a "
                f"process group with other backends ({found}). {instead}; or pass "
                f"process_group_backend={has.get(device.type, found)!r}."
            )
    if device.type not in has:
        raise MisconfigurationException(
            f"The {api_name} trains on {device.type}, but this process is already in a process group without a backend "
            f"for it ({found}). {instead}."
        )
    usual = dist.get_default_backend_for_device(device)
    if not asked and has[device.type] != usual:
        rank_zero_warn(
            f"The {api_name} trains on {device.type} in a process group that exists already and communicates by "
            f"{has[device.type]}; {usual} is the default there, and may be much faster. {instead}. If "
            f"{has[device.type]} is intended, pass process_group_backend={has[device.type]!r}."
        )


def _by_device(backends: str, device: torch.device) -> dict[str, str]:
    """Split ``"cpu:gloo,cuda:nccl"``; a single name is the backend for ``device``."""
    pairs = [pair.rpartition(":") for pair in backends.split(",") if pair]
    return {kind or device.type: backend for kind, _, backend in pairs}


def _call(api_name: str, devices: int, nodes: int) -> str:
    return f"{api_name}(devices={devices}{f', num_nodes={nodes}' if nodes > 1 else ''})"


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
