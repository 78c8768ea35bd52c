"""What this machine is: versions, devices, links between them, limits of the system. Only looks, and answers with what
JSON can hold."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lightning_zero.native.links import uuid_of, why_no_atomics

__all__ = ["devices", "links", "system", "versions"]

PACKAGES = ("lightning-zero", "lightning", "torchmetrics", "triton", "transformers", "deepspeed", "rich", "matplotlib")
SHARED_MEMORY = Path("/dev/shm")
ASK_S = 20.0  # that another program gets to answer


def versions() -> dict[str, Any]:
    """Of whatever a training depends on; None: not installed."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {name.replace("-", "_"): _package(name) for name in PACKAGES}
    found["cuda"] = torch.version.cuda
    found["nccl"] = None
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["driver"] = asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or None
    found["system"] = f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}"
    return found


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def asked(*command: str) -> str:
    """What a program prints; empty where there is none, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def devices() -> list[str]:
    """What ranks would train on, each in words; on a machine without GPUs none."""
    if not torch.cuda.is_available():
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        gib, major, minor = device.total_memory / 2**30, device.major, device.minor
        found.append(f"cuda:{number} {device.name}, {gib:.1f} GiB, compute capability {major}.{minor}")
    return found


def links(count: int) -> dict[str, Any]:
    """Which pairs of ``count`` GPUs cannot reach each other's memory, or have no atomic operations on it, without which
    ranks cannot wait for each other there; and the driver's table of how they are connected."""
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    apart = [f"cuda:{a} and cuda:{b}" for a, b in pairs if a < b and not torch.cuda.can_device_access_peer(a, b)]
    reasons = {(a, b): why_no_atomics(torch.device("cuda", a), [uuid_of(a), uuid_of(b)]) for a, b in pairs if a < b}
    return {
        "cannot_read_each_other": apart,
        "no_atomics": [f"cuda:{a} and cuda:{b}: {reason}" for (a, b), reason in reasons.items() if reason],
        "topology": asked("nvidia-smi", "topo", "-m").splitlines() if count else [],
    }


def system() -> dict[str, Any]:
    """The host: cores, NUMA nodes, memory, limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return {
        "cores": os.cpu_count(),
        "cores_of_this_process": len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
        "numa_nodes": len(nodes),
        "memory_gib": _gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "shared_memory_gib": _gib(shared.total) if shared else None,
        "shared_memory_free_gib": _gib(shared.free) if shared else None,
        "open_files": soft,
        "open_files_at_most": hard,
    }


def _gib(nbytes: int) -> float:
    return round(nbytes / 2**30, 2)
