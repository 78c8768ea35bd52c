"""Ranks that share one model, their process groups and their hosts.

Every process of the world makes its mesh at the same point of its program, by :meth:`Mesh.from_world` (all ranks) or
:meth:`Mesh.from_parts` (several models on disjoint ranks). All other modules get ranks and groups from the mesh and do
not query ``torch.distributed``. A mesh is immutable: other ranks need a new one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_zero.compat.distributed import all_gather_into, connect_lazily, default_store
from lightning_zero.errors import UnsupportedError

NO_TIMEOUT = timedelta(days=365)


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Ranks of a mesh with process groups of their own.

    They are the ranks of one host, or the ranks with one local rank on all hosts.

    Attributes:
        ranks: Ranks in the mesh, in the order of this group.
        rank: This rank's position in ``ranks``.
        gather_group, reduce_group: Process groups for weights and for gradients.
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
    """The ranks over which one model is sharded. Ranks are numbered within the mesh, from 0.

    Attributes:
        device: Device of this rank.
        rank: This rank.
        world_size: Number of ranks in the mesh.
        hosts: Host number of each rank; hosts are numbered in the order of their first ranks.
        physical_hosts: As ``hosts``, but of the machines themselves, which ``ranks_per_host`` may divide or join.
        intra_host: The ranks of this rank's host.
        inter_host: With several hosts, the ranks with this local rank; None with one host.
        replicated: True if each of several hosts holds the full model; False if all hosts hold it together.
        gather_group: Process group of all ranks, for broadcasts from rank 0 and for all-gathers of weights on one host.
        reduce_group: As ``gather_group``, for gradients, so that reductions do not queue after gathers. No other
            collective uses it: an unused group takes no device memory.
        control_group: CPU group (gloo) in which ranks agree without using the device.
        world_group: The default process group of all processes. Lightning's barriers use it.
        timeout_s: Timeout of these groups in seconds.
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
    def from_world(
        cls,
        device: torch.device,
        timeout: timedelta | None = None,
        ranks_per_host: int | None = None,
        replicate: bool = False,
    ) -> Mesh:
        """Make one mesh of all processes. Collective.

        Args:
            device: Device of this rank.
            timeout: Timeout of the new process groups; by default torch's.
            ranks_per_host: Treat this many neighboring ranks as one host; by default hosts are detected.
            replicate: Each host holds the full model.

        Raises:
            RuntimeError: ``torch.distributed`` is not initialized.
            UnsupportedError: Hosts have different numbers of ranks, or gloo would communicate for a GPU.
        """
        _check_initialized()
        return cls.from_parts([range(dist.get_world_size())], device, timeout, ranks_per_host, replicate)

    @classmethod
    def from_parts(
        cls,
        parts: Iterable[Sequence[int]],
        device: torch.device,
        timeout: timedelta | None = None,
        ranks_per_host: int | None = None,
        replicate: bool = False,
    ) -> Mesh:
        """Make a mesh for each part of the world and return this process's.

        Collective over all processes of the world.

        Each process passes all parts in the same order, because ``torch.distributed.new_group`` must be called for all
        groups in one order on all processes.

        Args:
            parts: For each mesh, the world ranks of its processes; each process is in exactly one part.
            device: Device of this rank.
            timeout: Timeout of the new process groups; by default torch's.
            ranks_per_host: Treat this many neighboring ranks of each part as one host; by default hosts are detected.
            replicate: Each host holds the full model of its part.

        Raises:
            RuntimeError: ``torch.distributed`` is not initialized.
            UnsupportedError: Hosts have different numbers of ranks, or gloo would communicate for a GPU.
            ValueError: A process of the world is in no part, or in several.
        """
        _check_initialized()
        check_backend(dist.get_backend_config(), device.type)
        parts = [sorted(part) for part in parts]
        _check_parts(parts, dist.get_world_size())
        backend, me, mine = dist.get_backend(), dist.get_rank(), 0
        groups: list[tuple[dist.ProcessGroup, ...]] = []
        for number, part in enumerate(parts):
            groups.append(
                (*_new_group_pair(part, backend, timeout), dist.new_group(part, backend="gloo", timeout=timeout))
            )
            mine = number if me in part else mine
        gather_group, reduce_group, control_group = groups[mine]
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
        fields = hosts, physical_hosts, intra_host, inter_host, replicate and inter_host is not None
        return cls(device, rank, size, *fields, gather_group, reduce_group, control_group, world, timeout_s)

    @property
    def device_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups whose collectives run on the device, where an error may appear long after the call."""
        sides = () if self.inter_host is None else (self.intra_host, self.inter_host)
        parts = [group for side in sides for group in (side.gather_group, side.reduce_group)]
        return self.world_group, self.gather_group, self.reduce_group, *parts

    @property
    def host_count(self) -> int:
        return 1 if self.inter_host is None else self.inter_host.size

    @property
    def inter_host_shard_group(self) -> RankGroup | None:
        """With several hosts that hold the model together, the ranks with this local rank; otherwise None."""
        return None if self.replicated else self.inter_host

    @property
    def shard_group(self) -> RankGroup:
        """The ranks that hold the model together: all ranks, or those of one host."""
        if self.replicated or self.inter_host is None:
            return self.intra_host
        return RankGroup(tuple(range(self.world_size)), self.rank, self.gather_group, self.reduce_group)

    @property
    def shard_host_count(self) -> int:
        """Number of hosts over which each parameter is sharded."""
        return 1 if self.inter_host_shard_group is None else self.inter_host_shard_group.size

    @property
    def shard_index(self) -> int:
        """Index of this rank's shard of each parameter.

        With several hosts, the ranks with one local rank hold neighboring shards, so that a host gathers or reduces one
        contiguous range. Replicas on other hosts hold the same shard.
        """
        return self.intra_host.rank * self.shard_host_count + (
            0 if self.inter_host_shard_group is None else self.inter_host_shard_group.rank
        )

    @property
    def replica(self) -> tuple[int, int]:
        """Index and number of the replicas of this rank's shards. Replicas share the work of writing them."""
        return (
            (self.inter_host.rank, self.inter_host.size) if self.replicated and self.inter_host is not None else (0, 1)
        )

    def all_gather_shard(self, shard: Tensor) -> Tensor:
        """Return the shards of all ranks, concatenated by shard index, on the mesh's device. Collective.

        ``shard`` is 1-D and has one size and dtype on all ranks.
        """
        shard = shard.to(self.device)
        for side in (
            (self.intra_host,)
            if self.inter_host_shard_group is None
            else (self.inter_host_shard_group, self.intra_host)
        ):
            parts = shard.new_empty(shard.numel() * side.size)
            all_gather_into()(parts, shard, group=side.gather_group)
            shard = parts
        return shard

    def store(self, prefix: str) -> dist.Store:
        """Return a key-value store for these ranks alone. ``prefix`` separates its users."""
        name = f"{prefix}/{self.control_group.group_name}"
        return dist.PrefixStore(name, default_store())

    def barrier(self) -> dist.Work:
        """Start a barrier of all ranks on the CPU.

        It ends when all ranks have joined, without a timeout. Collective.
        """
        options = distributed_c10d.BarrierOptions()
        options.timeout = NO_TIMEOUT
        return self.control_group.barrier(options)

    def all_gather_values(self, value: Any) -> list[Any]:
        """Return the value that each rank passes, in the order of ranks. Collective, on the CPU.

        Values are pickled. Each rank unpickles the values of the other ranks, and so trusts them.
        """
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control_group)
        return values

    def first_difference(self, mine: Sequence[str]) -> tuple[int, str, str] | None:
        """Return the first rank with another list of lines than rank 0, and both lines; None if all agree.

        Collective, on the CPU.
        """
        everyones = self.all_gather_values(list(mine))
        other = next((rank for rank, lines in enumerate(everyones) if lines != everyones[0]), None)
        if other is None:
            return None
        pairs = zip_longest(everyones[0], everyones[other], fillvalue="(nothing)")
        return other, *next((one, two) for one, two in pairs if one != two)

    def first_rank_error(self, error: str | None) -> tuple[int, str] | None:
        """Return the first rank that passes an error, and the error; None if no rank does.

        Collective, on the CPU.

        Call it after an operation that may fail on one rank, so that the other ranks do not wait for the failed one.
        """
        errors = self.all_gather_values(error)
        return next(((rank, text) for rank, text in enumerate(errors) if text is not None), None)


def host_numbers(names: Sequence[str], ranks_per_host: int | None = None) -> tuple[int, ...]:
    """Return the host number of each rank, given the host name of each.

    Raises:
        UnsupportedError: Hosts have different numbers of ranks.
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
    """Return this process's intra-host and inter-host groups.

    None if the process is not in ``part`` or there is one host.

    Collective over all processes of the world.
    """
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
    """Return a group for gathers and one for reductions. Collective over all processes of the world.

    A NCCL communicator takes about 0.5 GiB of device memory, so the second group connects at its first collective:
    with peer copies it is never used.
    """
    gathers = dist.new_group(ranks, backend=backend, timeout=timeout)
    with connect_lazily():
        return gathers, dist.new_group(ranks, backend=backend, timeout=timeout)


def number_names(names: Sequence[str]) -> tuple[int, ...]:
    """Number the names from 0 in the order of first occurrence; equal names get equal numbers."""
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(order[name] for name in names)


def host_name() -> str:
    """Return a name that no other host has. Containers of one host may share it."""
    # hosts of one image may share the hostname, and hosts of one cloud the boot id
    return f"{socket.gethostname()} {boot_id()}"


def boot_id() -> str:
    """Return an id that changes at each boot of the host; empty if the host has none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised. Call torch.distributed.init_process_group() first.")


def check_backend(backends: str, device_type: str) -> None:
    """Raise :class:`UnsupportedError` if the world's process group cannot gather on this device type.

    Args:
        backends: backends by device type, as in ``dist.get_backend_config()``: ``"cpu:gloo,cuda:nccl"``.
    """
    backend = dict(part.partition(":")[::2] for part in backends.split(",")).get(device_type)
    # gloo's coalesced all-gather reads device pointers on the host, which ends the process.
    if device_type == "cpu" or backend not in (None, "gloo"):
        return
    default = dist.get_default_backend_for_device(device_type)
    found = "has no backend for it" if backend is None else "uses gloo for it"
    raise UnsupportedError(
        f"The model is on a {device_type} device, but torch.distributed's process group {found} (backend "
        f"{backends!r}). gloo gathers only weights on the CPU. Leave process_group_backend out, or pass "
        f"process_group_backend='cpu:gloo,{device_type}:{default}'; without the strategy's own process group, call "
        f"torch.distributed.init_process_group('cpu:gloo,{device_type}:{default}')."
    )


def _check_parts(parts: Sequence[Sequence[int]], world_size: int) -> None:
    given = sorted(chain.from_iterable(parts))
    if given != list(range(world_size)) or not all(parts):
        raise ValueError(
            f"The parts {[list(part) for part in parts]} of a mesh do not divide the {world_size} processes of the "
            f"world among them. Give each rank from 0 to {world_size - 1} to exactly one part, the same parts in the "
            "same order on every process: all of them make all process groups together."
        )


RunCollective = Callable[[Callable[[bool], dist.Work | None]], None]


def run_synchronously(start: Callable[[bool], dist.Work | None]) -> None:
    """Run a collective and wait for it."""
    start(False)


def all_max(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the elementwise maximum over all ranks; NaN if any rank has NaN. Collective.

    Args:
        values: Floating-point numbers of any shape, the same shape on every rank.
        group: Process group of the ranks.
    """
    return _gather_from_ranks(values, group).amax(0)


def all_min(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the elementwise minimum over all ranks; NaN if any rank has NaN. Collective."""
    return _gather_from_ranks(values, group).amin(0)


def _gather_from_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = values.new_empty(group.size(), *values.shape)
    all_gather_into()(ranks.view(-1), values.detach().reshape(-1), group=group)
    return ranks
