"""Which CPUs lie next to a GPU: memory that these touch first is read by it fastest."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["cpus_near", "parsed"]

SYS = Path("/sys")


def cpus_near(device: torch.device, sys: Path = SYS) -> frozenset[int]:
    """Those of the GPU's NUMA node that this process may run on; empty where that is not known, or there are none."""
    place = _place(device)
    if place is None:
        return frozenset()
    try:
        node = int((sys / "bus/pci/devices" / place / "numa_node").read_text())
        cpus = (sys / f"devices/system/node/node{node}/cpulist").read_text()  # no node: -1
    except (OSError, ValueError):
        return frozenset()
    return parsed(cpus) & os.sched_getaffinity(0)


def parsed(text: str) -> frozenset[int]:
    """Of the kernel's lists of numbers: ``"0-2,8"`` is 0, 1, 2 and 8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _place(device: torch.device) -> str | None:
    """On the PCI bus, as sysfs writes it."""
    if device.type != "cuda":
        return None
    known = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(known, name) for name in names):
        return None
    return "{:04x}:{:02x}:{:02x}.0".format(*(getattr(known, name) for name in names))
