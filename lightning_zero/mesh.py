"""Who takes part: the ranks that share one model, their process groups, and where each of them runs.

Protocol: every process of the world makes its mesh at the same point of its program, by :meth:`Mesh.of` (all ranks) or
:meth:`Mesh.over` (several models, each over ranks of its own), and hands it to whatever talks to other ranks. Nothing
below asks ``torch.distributed`` who is there. A mesh never changes: other ranks need another one.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.compat.distributed import default_store

__all__ = ["Mesh", "boot_id", "host_name"]


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks over which one model is sharded, seen from one of them. Ranks are numbered within the mesh, from 0.

    Attributes:
        device: of this rank.
        rank: this one.
        world_size: number of ranks in the mesh.
        hosts: of each rank, the number of its host; hosts are numbered in the order of their first ranks.
        shard_group: in which weights are all-gathered, and rank 0's values are sent.
        reduce_group: in which gradients are reduced; another one, so that reductions do not queue behind gathers.
        control_group: on the CPU (gloo), in which ranks agree without touching the device.
        world_group: of all processes; not ours: what else they do together, Lightning's barriers say, goes on in it.
        timeout_s: how many seconds ranks wait for each other in these groups.
    """

    device: torch.device
    rank: int
    world_size: int
    hosts: tuple[int, ...]
    shard_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    control_group: dist.ProcessGroup
    world_group: dist.ProcessGroup
    timeout_s: float

    @classmethod
    def of(cls, device: torch.device, timeout: timedelta | None = None) -> Mesh:
        """All processes, as one mesh. Collective.

        Args:
            device: of this rank.
            timeout: of the process groups that are made; by default torch's.

        Raises:
            RuntimeError: ``torch.distributed`` is not initialised.
        """
        _check_initialized()
        return cls.over([range(dist.get_world_size())], device, timeout)

    @classmethod
    def over(cls, parts: Iterable[Sequence[int]], device: torch.device, timeout: timedelta | None = None) -> Mesh:
        """A mesh for each part of the world; returns the one that this process belongs to. Collective over all
        processes of the world, each of which gives all parts in the same order: ``torch.distributed.new_group`` wants
        that, and groups made otherwise would take each other's messages.

        Args:
            parts: of each mesh, the ranks of its processes in the world; each process in exactly one.
            device: of this rank.
            timeout: of the process groups that are made; by default torch's.

        Raises:
            RuntimeError: ``torch.distributed`` is not initialised.
            ValueError: a process of the world is in no part, or in several.
        """
        _check_initialized()
        parts = [sorted(part) for part in parts]
        _check_parts(parts, dist.get_world_size())
        backend, me, made = dist.get_backend(), dist.get_rank(), []
        for part in parts:
            groups = [dist.new_group(part, backend=name, timeout=timeout) for name in (backend, backend, "gloo")]
            if me in part:
                made = groups
        shard_group, reduce_group, control_group = made
        timeout_s = (timeout or dist.constants.default_pg_timeout).total_seconds()
        world = dist.group.WORLD
        assert world is not None
        size = control_group.size()
        names: list[Any] = [None] * size
        dist.all_gather_object(names, host_name(), group=control_group)
        hosts = numbered(names)
        return cls(
            device, control_group.rank(), size, hosts, shard_group, reduce_group, control_group, world, timeout_s
        )

    @property
    def device_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Those whose collectives run on the device, where an error may show long after the call."""
        return self.world_group, self.shard_group, self.reduce_group

    def store(self, prefix: str) -> dist.Store:
        """A key-value store of these ranks' own. ``prefix`` is the user's of it among ours."""
        name = f"{prefix}/{self.control_group.group_name}"
        return dist.PrefixStore(name, default_store())

    def gathered(self, value: Any) -> list[Any]:
        """What each rank gives here, in their order: anything that can be pickled. Collective, on the CPU."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control_group)
        return values


def numbered(names: Sequence[str]) -> tuple[int, ...]:
    """For each name a number, the same for equal ones, from 0 in the order in which they first come."""
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(order[name] for name in names)


def host_name() -> str:
    """The host of this process, other than any other host's; containers of one host may share it."""
    return f"{socket.gethostname()} {boot_id()}"  # of hosts of one image, or of one cloud, either may be the same


def boot_id() -> str:
    """Another one each time that a host starts; empty where it does not tell."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised. Call torch.distributed.init_process_group() first.")


def _check_parts(parts: Sequence[Sequence[int]], world_size: int) -> None:
    given = sorted(chain.from_iterable(parts))
    if given != list(range(world_size)) or not all(parts):
        raise ValueError(
            f"The parts {[list(part) for part in parts]} of a mesh do not divide the {world_size} processes of the "
            f"world among them. Give each rank from 0 to {world_size - 1} to exactly one part, the same parts in the "
            "same order on every process: all of them make all process groups together."
        )
