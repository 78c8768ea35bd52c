"""Whether hosts are alike, when a launcher has started the doctor on several.

Protocol: every process of the job makes ``Job.of(environment)``, and calls :meth:`Job.heard` with what it says of
itself. Rank 0 gets what all have said, and :func:`compared` makes of it what is to be mended; the others get nothing
and need not wait. Only a store is used, so that what keeps collectives from running cannot keep this from being said.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_zero.errors import UnsupportedError

__all__ = ["Job", "compared", "said"]

MUST_BE_EQUAL = ("python", "torch", "cuda", "nccl", "lightning", "lightning_zero")
OF_NETWORKS = ("NCCL_", "GLOO_")


@dataclass(frozen=True)
class Job:
    """This process among those that a launcher has started.

    Attributes:
        rank: of this process.
        world_size: number of processes.
        local_rank: of this process on its host.
        address: where rank 0, or an agent of torchrun, serves a store.
        port: likewise.
        served: by an agent, and not by rank 0.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    served: bool

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Job | None:
        """By torchrun's variables, or by those that srun sets; None: nobody has, or only this one process.

        Raises:
            UnsupportedError: Lightning would refuse what srun has set.
        """
        if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            if int(environment["WORLD_SIZE"]) == 1:
                return None
            return cls(
                int(environment["RANK"]),
                int(environment["WORLD_SIZE"]),
                int(environment.get("LOCAL_RANK", "0")),
                environment["MASTER_ADDR"],
                int(environment["MASTER_PORT"]),
                environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        # A batch script has the other variables of its job, too, but only srun starts all tasks.
        if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            try:
                slurm = SLURMEnvironment(auto_requeue=False)
            except RuntimeError as error:  # a training would end there, too
                raise UnsupportedError(f"Lightning does not take this job of SLURM: {error}") from error
            place = slurm.global_rank(), slurm.world_size(), slurm.local_rank()
            return cls(*place, slurm.main_address, slurm.main_port, served=False)
        return None

    def heard(self, mine: Mapping[str, Any], limit_s: float) -> dict[int, dict[str, Any]]:
        """On rank 0 what each rank says of itself, by rank, without those that have said nothing after ``limit_s``.
        Empty on other ranks.

        Raises:
            UnsupportedError: the store cannot be reached.
        """
        try:
            store = dist.PrefixStore("lightning_zero/doctor", self._store(limit_s))
            store.set(str(self.rank), json.dumps(mine))
            if self.rank != 0:
                store.get(str(self.rank))  # comes back only when the store has it
                return {}
        except dist.DistError as error:
            raise UnsupportedError(
                f"Rank {self.rank} on {mine['host']} does not reach {self.address}:{self.port} (MASTER_ADDR, "
                f"MASTER_PORT) within {limit_s:g} s: {str(error).splitlines()[0]} Check that rank 0 was started, that "
                "the address is that of its host as other hosts see it, and that no firewall closes the port."
            ) from error
        return self._all(store, time.monotonic() + limit_s)

    def _all(self, store: dist.Store, deadline: float) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in range(self.world_size):
            try:
                store.wait([str(rank)], timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
            except dist.DistError:
                continue
            found[rank] = json.loads(store.get(str(rank)))
        return found

    def _store(self, limit_s: float) -> dist.Store:
        return dist.TCPStore(
            self.address,
            self.port,
            is_master=self.rank == 0 and not self.served,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=True,
        )


def said(facts: Mapping[str, Any], host: str, to_mend: list[str]) -> dict[str, Any]:
    """What a rank says of itself, of all that it has gathered."""
    variables = {name: value for name, value in facts["variables"].items() if name.startswith(OF_NETWORKS)}
    return {
        "host": host,
        "versions": {name: facts["versions"].get(name) for name in MUST_BE_EQUAL},
        "variables": variables,
        "to_mend": to_mend,
    }


def compared(world_size: int, heard: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Who is there, what is to be mended, and what may be wanted. Pure."""
    ranks = defaultdict(list)
    for rank, one in heard.items():
        ranks[one["host"]].append(rank)
    silent = [rank for rank in range(world_size) if rank not in heard]
    to_mend = []
    if silent:
        to_mend.append(
            f"Of {world_size} ranks {_numbers(silent)} said nothing. Look at what they print; those that were heard "
            f"are on {', '.join(ranks)}."
        )
    for name in MUST_BE_EQUAL:
        if differing := _differing({rank: one["versions"][name] for rank, one in heard.items()}, heard):
            to_mend.append(f"{name} is not the same everywhere: {differing}. Install the same version on all hosts.")
    others: dict[str, list[int]] = defaultdict(list)
    for rank, one in heard.items():
        for line in one["to_mend"]:
            others[f"{one['host']}: {line}"].append(rank)
    to_mend += others
    names = sorted({name for one in heard.values() for name in one["variables"]})
    notes = []
    for name in names:
        if differing := _differing({rank: one["variables"].get(name) for rank, one in heard.items()}, heard):
            notes.append(f"{name} is not the same everywhere: {differing}.")
    return {
        "heard": {host: _numbers(numbers) for host, numbers in ranks.items()},
        "to_mend": to_mend,
        "notes": notes,
    }


def _differing(values: Mapping[int, Any], heard: Mapping[int, Mapping[str, Any]]) -> str:
    """Each value and who has it; empty where all have the same."""
    holders: dict[Any, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, value in values.items():
        holders[value][heard[rank]["host"]].append(rank)
    if len(holders) < 2:
        return ""
    return "; ".join(
        f"{'none' if value is None else value} on "
        + ", ".join(f"{host} ({_numbers(numbers)})" for host, numbers in hosts.items())
        for value, hosts in holders.items()
    )


def _numbers(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0 to 7``, ``ranks 0, 2, 5``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
