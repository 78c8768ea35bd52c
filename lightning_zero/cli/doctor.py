"""Describe this machine, train a tiny model on all devices, and name problems to fix (``doctor``).

:func:`gather_facts` starts nothing. :func:`to_fix` and :func:`notes` are pure functions of the facts.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from lightning_zero.cli.hosts import Job, compare_hosts, network, summarize
from lightning_zero.cli.self_test import self_test
from lightning_zero.cli.status_line import StatusLine
from lightning_zero.cli.terminal import show_section
from lightning_zero.compat.lookup import missing
from lightning_zero.compat.patches import PATCHES, required_but_absent
from lightning_zero.compat.versions import is_tested, tested
from lightning_zero.compile.events import left_out
from lightning_zero.config.text import format_bytes
from lightning_zero.errors import NativeBuildError
from lightning_zero.native.build import build, is_built
from lightning_zero.native.gpu_atomics import gpu_uuid, no_atomics_reason

PACKAGES = ("lightning-zero", "lightning", "torchmetrics", "triton", "transformers", "deepspeed", "rich", "matplotlib")
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_SYMMMEM")  # of environment variables for communication
NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
IN_JSON_ONLY = {"losses", "failed", "missing", "to_fix", "notes"}
GATHER_S = 60.0  # for the summaries of all ranks: hosts may start at different times
MIN_OPEN_FILES = 1024  # for the sockets of many ranks, and data loaders
MIN_SHM_GIB = 0.25  # Docker's 64 MiB are too few for NCCL and the workers of data loaders


def run(arguments: Namespace, status: StatusLine) -> int:
    """Run the command, and return the exit status.

    Rank 0 of several hosts reports on all; the first rank of each other host only on its own self-test.
    """
    status.update("looking at this machine")
    facts, job, host = gather_facts(), Job.from_environment(os.environ), socket.gethostname()
    if job is not None:
        summaries = job.gather(summarize(facts, host, to_fix(facts)), GATHER_S)
        if job.rank == 0:
            facts["hosts"] = compare_hosts(job.world_size, summaries)
        elif job.local_rank != 0:
            return 0
    if not arguments.no_self_test and not to_fix(facts):
        try:
            status.update("building the C++ executor")
            build(report=status.log)  # before the time limit begins
            status.update("training a tiny model on all devices")
            facts |= {"self_test": self_test(arguments.timeout), "executor": {"built": is_built()}}
        except NativeBuildError as error:
            facts["build_error"] = str(error)
    status.close()
    facts |= {"to_fix": to_fix(facts), "notes": notes(facts)}
    facts["ok"] = not facts["to_fix"]
    diagnosis = "ok" if facts["ok"] else f"to fix: {facts['to_fix'][0]}"
    if job is not None and job.rank != 0:
        print(f"{host}: {diagnosis}", file=sys.stderr)
    elif arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        show_section("devices", {str(number): device for number, device in enumerate(facts["devices"])})
        for section, values in facts.items():
            if values and isinstance(values, dict):
                show_section(section.replace("_", "-"), {k: v for k, v in values.items() if k not in IN_JSON_ONLY})
        print(*(f"note: {note}" for note in facts["notes"]), f"\n{diagnosis}", sep="\n")
    return 0 if facts["ok"] else 1


def gather_facts() -> dict[str, Any]:
    """Return facts by section, as values of JSON, without starting anything."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = []
    for number in range(count):
        gpu = torch.cuda.get_device_properties(number)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        devices.append(f"cuda:{number} {gpu.name}, {format_bytes(gpu.total_memory)}, {capability}")
    apart, no_atomics = [], []
    for one, other in combinations(range(count), 2):
        pair = f"cuda:{one} and cuda:{other}"
        if not torch.cuda.can_device_access_peer(one, other):
            apart.append(pair)
        # Ranks wait for each other by atomic operations in peer memory.
        if reason := no_atomics_reason(torch.device("cuda", one), [gpu_uuid(one), gpu_uuid(other)]):
            no_atomics.append(f"{pair}: {reason}")
    shared, (soft, hard) = Path("/dev/shm"), resource.getrlimit(resource.RLIMIT_NOFILE)
    left = left_out()
    return {
        "versions": versions(),
        "devices": devices or ["cpu"],
        "links": {"cannot_read_each_other": apart, "no_atomics": no_atomics} if count > 1 else {},
        "system": {
            "shared_memory_gib": round(shutil.disk_usage(shared).total / 2**30, 2) if shared.is_dir() else None,
            "open_files": soft,
            "open_files_at_most": hard,
        },
        "network": network(),
        "compilation": {
            "tested_with_torch": tested("torch"),
            "tested": is_tested(str(torch.__version__)),
            "optimizations_in_use": len(PATCHES) - len(left),
            "left_out": left,
            "missing": required_but_absent(),
        },
        "executor": {"built": is_built()},
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES) or k in NAMES},
    }


def versions() -> dict[str, Any]:
    """Return the versions of installed software that a training uses."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name.replace("-", "_")] = version(name)
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.check_output(query, text=True, timeout=20).partition("\n")[0]
    return found


def to_fix(facts: Mapping[str, Any]) -> list[str]:
    """Return problems and their solutions, the worst first. A training runs if there are none."""
    system, network = facts["system"], facts["network"]
    found = [facts["build_error"]] if facts.get("build_error") else []
    if system["open_files"] < MIN_OPEN_FILES:
        found.append(
            f"A process may open {system['open_files']} files, which sockets of many ranks and data loaders exceed. "
            f"Run `ulimit -n {max(MIN_OPEN_FILES, min(system['open_files_at_most'], 65536))}` before training."
        )
    found += [missing(name) for name in facts["compilation"]["missing"][:1]]
    interfaces = f"network interfaces with an address: {', '.join(network['interfaces']) or 'none'}"
    devices = sorted({port["device"] for port in network["infiniband"]})
    for variable, value in network["missing"].items():
        there = interfaces if variable != "NCCL_IB_HCA" else f"InfiniBand devices: {', '.join(devices) or 'none'}"
        found.append(
            f"{variable} names {value}, which this host does not have ({there}). Unset it, or name one of these."
        )
    found += [line for line in facts.get("hosts", {}).get("to_fix", []) if line not in found]
    if failed := facts.get("self_test", {}).get("failed"):
        found.append(f"The self-test failed: {failed}")
    return found


def notes(facts: Mapping[str, Any]) -> list[str]:
    """Return causes of slower training, and how to avoid each."""
    compilation, network, variables, found = facts["compilation"], facts["network"], facts["variables"], []
    torch_version = f"torch {facts['versions']['torch']}"
    if not compilation["tested"]:
        found.append(f"{torch_version} is not one of those tested ({compilation['tested_with_torch']}).")
    if compilation["left_out"]:
        found.append(f"Optimizations that do not fit {torch_version}: {'; '.join(compilation['left_out'])}.")
    shared = facts["system"]["shared_memory_gib"]
    if shared is not None and shared < MIN_SHM_GIB:
        found.append(
            f"/dev/shm holds {shared:g} GiB, which NCCL and data loaders' workers share. In a container give it more: "
            "`docker run --shm-size=8g`, or --ipc=host."
        )
    if not network["other_hosts_reachable"]:
        found.append(
            f"No other host can reach this one: its interfaces with an address are {', '.join(network['interfaces'])}. "
            "That is enough for one host; for several, start the container with --network=host."
        )
    if idle := [port for port in network["infiniband"] if port["state"] != "ACTIVE"]:
        ports = ", ".join(f"{port['device']}:{port['port']} ({port['state'] or 'unknown'})" for port in idle)
        found.append(f"InfiniBand ports that are not active: {ports}. NCCL leaves them out.")
    by_sockets = variables.get("NCCL_IB_DISABLE", "0") != "0" or variables.get("NCCL_NET", "").lower() == "socket"
    if by_sockets and len(idle) < len(network["infiniband"]):
        found.append(
            "There are InfiniBand devices, and NCCL_IB_DISABLE or NCCL_NET keeps NCCL from using them: hosts talk by "
            "TCP, several times slower."
        )
    if variables.get("NCCL_P2P_DISABLE", "0") != "0":
        found.append("NCCL_P2P_DISABLE is set: NCCL's collectives between GPUs go through the host's memory.")
    return found + facts.get("hosts", {}).get("notes", [])
