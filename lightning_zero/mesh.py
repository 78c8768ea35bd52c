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
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_zero.compat.distributed import all_gather_into, connect_lazily, default_store
from lightning_zero.errors import UnsupportedError

__all__ = ["Mesh", "RankGroup", "boot_id", "host_name"]

NO_TIMEOUT = timedelta(days=365)


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Some of a mesh's ranks that communicate among themselves: those of one host, or those at one place of all hosts.

    Attributes:
        ranks: of the mesh, in their order here.
        rank: this one's number among them.
        gather_group, reduce_group: of weights and of gradients, as those of the mesh.
    """

    ranks: tuple[int, ...]
    rank: int
    gather_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks over which one model is sharded, seen from one of them. Ranks are numbered within the mesh, from 0.

    Attributes:
        device: of this rank.
        rank: this one.
        world_size: number of ranks in the mesh.
        hosts: of each rank, the number of its host; hosts are numbered in the order of their first ranks.
        machines: likewise, of what ranks really run on: ``ranks_per_host`` may have told them apart otherwise.
        inside: the ranks of this rank's host.
        across: where there are several hosts, the ranks at this rank's place of each; None where there is one.
        replicated: whether each of several hosts holds all of the model; otherwise all hosts hold it together.
        gather_group: of all ranks: in which rank 0's values are sent, and weights are all-gathered on one host.
        reduce_group: likewise for gradients; another one, so that reductions do not queue behind gathers. Nothing else
            goes through it: one that is never used takes no memory of the device.
        control_group: on the CPU (gloo), in which ranks agree without touching the device.
        world_group: of all processes; not ours: what else they do together, Lightning's barriers say, goes on in it.
        timeout_s: how many seconds ranks wait for each other in these groups.
    """

    device: torch.device
    rank: int
    world_size: int
    hosts: tuple[int, ...]
    physical_hosts: tuple[int, ...]
    intra_host: RankGroup
    inter_host: RankGroup | None
    replicated: bool
    gather_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    control_group: dist.ProcessGroup
    world_group: dist.ProcessGroup
    timeout_s: float

    @classmethod
    def of(
        cls,
        device: torch.device,
        timeout: timedelta | None = None,
        ranks_per_host: int | None = None,
        replicate: bool = False,
    ) -> Mesh:
        """All processes, as one mesh. Collective.

        Args:
            device: of this rank.
            timeout: of the process groups that are made; by default torch's.
            ranks_per_host: so many neighbouring ranks are taken for those of one host; by default they find out.
            replicate: each host is to hold all of the model.

        Raises:
            RuntimeError: ``torch.distributed`` is not initialised.
            UnsupportedError: hosts have different numbers of ranks.
        """
        _check_initialized()
        return cls.over([range(dist.get_world_size())], device, timeout, ranks_per_host, replicate)

    @classmethod
    def over(
        cls,
        parts: Iterable[Sequence[int]],
        device: torch.device,
        timeout: timedelta | None = None,
        ranks_per_host: int | None = None,
        replicate: bool = False,
    ) -> Mesh:
        """A mesh for each part of the world; returns the one that this process belongs to. Collective over all
        processes of the world, each of which gives all parts in the same order: ``torch.distributed.new_group`` wants
        that, and groups made otherwise would take each other's messages.

        Args:
            parts: of each mesh, the ranks of its processes in the world; each process in exactly one.
            device: of this rank.
            timeout: of the process groups that are made; by default torch's.
            ranks_per_host: so many neighbouring ranks of each part are taken for those of one host; by default they
                find out.
            replicate: each host is to hold all of its part's model.

        Raises:
            RuntimeError: ``torch.distributed`` is not initialised.
            UnsupportedError: hosts have different numbers of ranks.
            ValueError: a process of the world is in no part, or in several.
        """
        _check_initialized()
        parts = [sorted(part) for part in parts]
        _check_parts(parts, dist.get_world_size())
        backend, me, mine = dist.get_backend(), dist.get_rank(), 0
        made: list[tuple[dist.ProcessGroup, ...]] = []
        for number, part in enumerate(parts):
            made.append((*_new_group_pair(part, backend, timeout), dist.new_group(part, backend="gloo", timeout=timeout)))
            mine = number if me in part else mine
        gather_group, reduce_group, control_group = made[mine]
        everyone = control_group if len(parts) == 1 else dist.new_group(backend="gloo", timeout=timeout)
        names: list[Any] = [None] * everyone.size()
        dist.all_gather_object(names, host_name(), group=everyone)
        hosts: tuple[int, ...] = ()
        physical_hosts: tuple[int, ...] = ()
        sides = None
        for number, part in enumerate(parts):
            found = host_numbers([names[rank] for rank in part], ranks_per_host)
            pairs = _new_host_groups(part, found, backend, timeout)
            if number == mine:
                hosts, physical_hosts, sides = found, number_names([names[rank] for rank in part]), pairs
        rank, size = control_group.rank(), control_group.size()
        intra_host, inter_host = sides or (RankGroup(tuple(range(size)), rank, gather_group, reduce_group), None)
        timeout_s = (timeout or dist.constants.default_pg_timeout).total_seconds()
        world = dist.group.WORLD
        assert world is not None
        places = hosts, physical_hosts, intra_host, inter_host, replicate and inter_host is not None
        return cls(device, rank, size, *places, gather_group, reduce_group, control_group, world, timeout_s)

    @property
    def device_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Those whose collectives run on the device, where an error may show long after the call."""
        sides = () if self.inter_host is None else (self.intra_host, self.inter_host)
        parts = [group for side in sides for group in (side.gather_group, side.reduce_group)]
        return self.world_group, self.gather_group, self.reduce_group, *parts

    @property
    def host_count(self) -> int:
        return 1 if self.inter_host is None else self.inter_host.size

    @property
    def inter_host_shard_group(self) -> RankGroup | None:
        """Of the hosts that hold the model together, the ranks at this rank's place; None where each holds all of it,
        and where there is one."""
        return None if self.replicated else self.inter_host

    @property
    def shard_group(self) -> RankGroup:
        """The ranks that hold the model together: all, or those of a host."""
        if self.replicated or self.inter_host is None:
            return self.intra_host
        return RankGroup(tuple(range(self.world_size)), self.rank, self.gather_group, self.reduce_group)

    @property
    def shard_host_count(self) -> int:
        """Over so many hosts each parameter is cut."""
        return 1 if self.inter_host_shard_group is None else self.inter_host_shard_group.size

    @property
    def shard_index(self) -> int:
        """Which shard of each parameter lies on this rank. With several hosts, those at one place of all hosts hold
        neighbouring shards: together what a host gathers, or reduces, as one piece. Where each host holds the whole
        model, they hold the same one."""
        return self.intra_host.rank * self.shard_host_count + (0 if self.inter_host_shard_group is None else self.inter_host_shard_group.rank)

    @property
    def replica(self) -> tuple[int, int]:
        """Which one of how many that hold this rank's shards it is: they share the work of writing them."""
        return (self.inter_host.rank, self.inter_host.size) if self.replicated and self.inter_host is not None else (0, 1)

    def all_gather_shard(self, shard: Tensor) -> Tensor:
        """Each rank's, 1-D and of one size and dtype, one behind the other in the order of their numbers, on the mesh's
        device. Collective."""
        shard = shard.to(self.device)
        for side in (self.intra_host,) if self.inter_host_shard_group is None else (self.inter_host_shard_group, self.intra_host):
            parts = shard.new_empty(shard.numel() * side.size)
            all_gather_into()(parts, shard, group=side.gather_group)
            shard = parts
        return shard

    def store(self, prefix: str) -> dist.Store:
        """A key-value store of these ranks' own. ``prefix`` is the user's of it among ours."""
        name = f"{prefix}/{self.control_group.group_name}"
        return dist.PrefixStore(name, default_store())

    def barrier(self) -> dist.Work:
        """Begins one of all ranks, on the CPU, which lasts until all have come: no timeout ends it. Collective."""
        options = distributed_c10d.BarrierOptions()
        options.timeout = NO_TIMEOUT
        return self.control_group.barrier(options)

    def all_gather_values(self, value: Any) -> list[Any]:
        """What each rank gives here, in their order: anything that can be pickled. Collective, on the CPU.

        Each rank unpickles what the others send, so other ranks are trusted, as in all collectives of objects.
        """
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control_group)
        return values

    def first_rank_error(self, error: str | None) -> tuple[int, str] | None:
        """The first that a rank reports, behind that rank's number; None if none does. Whoever may fail asks for it
        before going on, so that no rank waits for one that has failed. Collective, on the CPU."""
        errors = self.all_gather_values(error)
        return next(((rank, text) for rank, text in enumerate(errors) if text is not None), None)


def host_numbers(names: Sequence[str], ranks_per_host: int | None = None) -> tuple[int, ...]:
    """Of each rank the number of its host, given what it calls its host.

    Raises:
        UnsupportedError: hosts have different numbers of ranks.
    """
    if ranks_per_host is not None:
        names = [str(rank // ranks_per_host) for rank in range(len(names))]
    hosts = number_names(names)
    sizes = [hosts.count(host) for host in range(max(hosts) + 1)]
    if len(set(sizes)) > 1:
        how = "by ranks_per_host=" + str(ranks_per_host) if ranks_per_host is not None else "as they were found"
        raise UnsupportedError(
            f"The {len(sizes)} hosts ({how}) have {', '.join(map(str, sizes))} ranks. Weights are gathered, and "
            "gradients reduced, between ranks at the same place of each host, so all hosts need the same number. Start "
            "as many processes on each; or pass tuning=Tuning(ranks_per_host=WORLD_SIZE): then each collective is one "
            "of all ranks, which is slower."
        )
    return hosts


def _new_host_groups(
    part: Sequence[int], hosts: Sequence[int], backend: str, timeout: timedelta | None
) -> tuple[RankGroup, RankGroup] | None:
    """The ranks of this process's host, and those at its place of each, if it is in ``part`` and there are several
    hosts. Collective over all processes of the world."""
    count = max(hosts) + 1
    if count == 1:
        return None
    by_host = [[rank for rank in range(len(part)) if hosts[rank] == host] for host in range(count)]
    by_place = list(zip(*by_host, strict=True))
    mine: list[RankGroup] = []
    for ranks in (*by_host, *by_place):
        world = [part[rank] for rank in ranks]
        groups = _new_group_pair(world, backend, timeout)
        if dist.get_rank() in world:
            mine.append(RankGroup(tuple(ranks), world.index(dist.get_rank()), *groups))
    return (mine[0], mine[1]) if mine else None


def _new_group_pair(
    ranks: Sequence[int], backend: str, timeout: timedelta | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """For gathers and for reductions, among these ranks of the world. A communicator of NCCL's takes half a GiB of each
    device (measured on H100s), and where copies move gradients none is wanted for these. Collective over the world."""
    gathers = dist.new_group(ranks, backend=backend, timeout=timeout)
    with connect_lazily():
        return gathers, dist.new_group(ranks, backend=backend, timeout=timeout)


def number_names(names: Sequence[str]) -> tuple[int, ...]:
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
