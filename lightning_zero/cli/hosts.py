"""Inspect the network of this host, and compare the hosts on which a launcher started the doctor.

The comparison uses only a store, so it works if collectives do not.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_zero.errors import UnsupportedError

MUST_BE_EQUAL = ("python", "torch", "cuda", "nccl", "lightning", "lightning_zero")
SIOCGIFADDR = 0x8915  # of linux/sockios.h: the IPv4 address of an interface
# Bridges and pairs of containers and virtual machines, which other hosts cannot reach.
VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "podman")


def has_address(name: str) -> bool:
    """Return True if an interface of this machine has an IPv4 or an IPv6 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return True
        except OSError:
            return any(line.split()[-1] == name for line in _read(Path("/proc/net/if_inet6")).splitlines())


def network(
    sys_class: Path = Path("/sys/class"),
    addressed: Callable[[str], bool] = has_address,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Return interfaces with an address, InfiniBand ports, and variables that name none of them."""
    names = [name for name in sorted(path.name for path in (sys_class / "net").glob("*")) if addressed(name)]
    ports = [
        {"device": path.parts[-3], "port": path.name, "state": _read(path / "state").rpartition(":")[2].strip()}
        for path in sorted((sys_class / "infiniband").glob("*/ports/*"))
    ]
    sockets, hca = environment.get("NCCL_SOCKET_IFNAME", ""), environment.get("NCCL_IB_HCA", "")
    gloo = [name for name in _split(environment.get("GLOO_SOCKET_IFNAME", "")) if name not in names]
    missing = {
        "NCCL_SOCKET_IFNAME": "" if _matches(names, sockets) else sockets,
        "GLOO_SOCKET_IFNAME": ",".join(gloo),
        "NCCL_IB_HCA": "" if _matches([port["device"] for port in ports], hca) else hca,
    }
    return {
        "interfaces": names,
        "infiniband": ports,
        "missing": {name: value for name, value in missing.items() if value},
        "other_hosts_reachable": any(name != "lo" and not name.startswith(VIRTUAL) for name in names),
    }


def _matches(names: Sequence[str], wanted: str) -> bool:
    """Return True if NCCL finds a name: prefixes with commas, full names after ``=``, others after ``^``."""
    excluded, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    parts = [part.split(":")[0] for part in _split(wanted.lstrip("^").removeprefix("="))]  # :port may follow a name
    return any(excluded != any(name == part if exact else name.startswith(part) for part in parts) for name in names)


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # only root may read some files
        return ""


class Job(NamedTuple):
    """This process among those that a launcher has started, and the address of a store."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    served: bool  # True if torchrun's agent serves the store, and not rank 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Job | None:
        """Return the job in torchrun's or srun's variables; None if this is the only process.

        Raises:
            UnsupportedError: Lightning does not accept srun's variables.
        """
        if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            rank, size, local = (int(environment.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
            served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            job = cls(rank, size, local, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), served)
            return None if size == 1 else job
        # A batch script has the other variables of its job, too, but only srun starts all tasks.
        if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
            return None
        try:
            slurm = SLURMEnvironment(auto_requeue=False)
        except RuntimeError as error:  # a training would fail, too
            raise UnsupportedError(f"Lightning does not take this job of SLURM: {error}") from error
        ranks = slurm.global_rank(), slurm.world_size(), slurm.local_rank()
        return cls(*ranks, slurm.main_address, slurm.main_port, served=False)

    def gather(self, summary: Mapping[str, Any], limit_s: float) -> dict[int, dict[str, Any]]:
        """Return on rank 0 the summaries that ranks send within ``limit_s``; an empty dict elsewhere.

        Raises:
            UnsupportedError: this process cannot reach the store.
        """
        master, timeout = self.rank == 0 and not self.served, timedelta(seconds=limit_s)
        try:
            plain = dist.TCPStore(self.address, self.port, None, master, timeout, False, multi_tenant=True)
            store = dist.PrefixStore("lightning_zero/doctor", plain)
            store.set(str(self.rank), json.dumps(summary))
            if self.rank != 0:
                store.get(str(self.rank))  # returns after the store has the summary
                return {}
        except dist.DistError as error:
            raise UnsupportedError(
                f"Rank {self.rank} on {summary['host']} does not reach {self.address}:{self.port} (MASTER_ADDR, "
                f"MASTER_PORT) within {limit_s:g} s: {str(error).splitlines()[0]} Check that rank 0 was started, that "
                "the address is that of its host as other hosts see it, and that no firewall closes the port."
            ) from error
        found, deadline = {}, time.monotonic() + limit_s
        for rank in range(self.world_size):
            try:
                store.wait([str(rank)], timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
            except dist.DistError:
                continue
            found[rank] = json.loads(store.get(str(rank)))
        return found


def summarize(facts: Mapping[str, Any], host: str, to_fix: list[str]) -> dict[str, Any]:
    """Return the facts of a rank that are compared between hosts."""
    variables = {name: value for name, value in facts["variables"].items() if name.startswith(("NCCL_", "GLOO_"))}
    versions = {name: facts["versions"].get(name) for name in MUST_BE_EQUAL}
    return {"host": host, "versions": versions, "variables": variables, "to_fix": to_fix}


def compare_hosts(world_size: int, summaries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ranks of each host, problems, and variables that differ."""
    hosts = defaultdict(list)
    for rank, one in summaries.items():
        hosts[one["host"]].append(rank)
    to_fix = []
    if silent := [rank for rank in range(world_size) if rank not in summaries]:
        to_fix.append(
            f"Of {world_size} ranks, no report arrived from {_ranks(silent)}. Look at their output; the ranks that "
            f"reported are on {', '.join(hosts)}."
        )
    for name in MUST_BE_EQUAL:
        if values := _differences(summaries, "versions", name):
            to_fix.append(f"{name} is not the same everywhere: {values}. Install the same version on all hosts.")
    to_fix += dict.fromkeys(f"{one['host']}: {line}" for one in summaries.values() for line in one["to_fix"])
    names = sorted({name for one in summaries.values() for name in one["variables"]})
    values_of = {name: _differences(summaries, "variables", name) for name in names}
    notes = [f"{name} is not the same everywhere: {values}." for name, values in values_of.items() if values]
    return {"heard": {host: _ranks(ranks) for host, ranks in hosts.items()}, "to_fix": to_fix, "notes": notes}


def _differences(summaries: Mapping[int, Mapping[str, Any]], section: str, name: str) -> str:
    """Return each value with its hosts and ranks; an empty text if all ranks have the same value."""
    ranks: dict[Any, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, one in summaries.items():
        ranks[one[section].get(name)][one["host"]].append(rank)
    texts = []
    for value, hosts in ranks.items():
        places = ", ".join(f"{host} ({_ranks(numbers)})" for host, numbers in hosts.items())
        texts.append(f"{'none' if value is None else value} on {places}")
    return "; ".join(texts) if len(texts) > 1 else ""


def _ranks(ranks: list[int]) -> str:
    """Return ``rank 3``, ``ranks 0 to 7`` or ``ranks 0, 2, 5``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    contiguous = ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]} to {ranks[-1]}" if contiguous else f"ranks {', '.join(map(str, ranks))}"
