"""What hosts reach each other by: network interfaces, InfiniBand devices, and which of them NCCL and gloo would take.
Only looks."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["has_address", "network"]

SYS_CLASS = Path("/sys/class")
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
SIOCGIFADDR = 0x8915  # of linux/sockios.h: the IPv4 address of an interface
# Bridges and pairs of containers and virtual machines, which no other host can reach.
VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "podman")


def network(
    sys_class: Path = SYS_CLASS,
    addressed: Callable[[str], bool] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Interfaces that have an address, InfiniBand ports, which interfaces would be chosen, and which variables name
    something that is not there.

    Args:
        sys_class: where the kernel lists devices.
        addressed: says of an interface's name whether it has an address.
        environment: by default this process's.
    """
    environment = os.environ if environment is None else environment
    addressed = addressed or has_address
    names = [name for name in _listed(sys_class / "net") if addressed(name)]
    ports = _ports(sys_class / "infiniband")
    chosen = _chosen(names, environment.get("NCCL_SOCKET_IFNAME", ""))
    missing = {}
    if environment.get("NCCL_SOCKET_IFNAME") and not chosen:
        missing["NCCL_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"]
    absent = [name for name in _split(environment.get("GLOO_SOCKET_IFNAME", "")) if name not in names]
    if absent:
        missing["GLOO_SOCKET_IFNAME"] = ",".join(absent)
    wanted = environment.get("NCCL_IB_HCA", "")
    if wanted and not _matching([port["device"] for port in ports], wanted, ports=True):
        missing["NCCL_IB_HCA"] = wanted
    return {
        "interfaces": names,
        "chosen_for_sockets": chosen,
        "infiniband": ports,
        "missing": missing,
        "other_hosts_reachable": any(not _is_local(name) for name in names),
    }


def has_address(name: str) -> bool:
    """Whether an interface of this machine has an IPv4 or an IPv6 address; without one nobody connects to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return True
        except OSError:
            pass
    lines = IPV6_ADDRESSES.read_text().splitlines() if IPV6_ADDRESSES.exists() else []
    return any(line.split()[-1] == name for line in lines)


def _listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _is_local(name: str) -> bool:
    return name == "lo" or name.startswith(VIRTUAL)


def _chosen(names: Sequence[str], wanted: str) -> list[str]:
    """As NCCL does: what the user wants, or else those whose names begin with ``ib``, or else those that are neither
    loopback nor of containers, or else any."""
    if wanted:
        return _matching(names, wanted)
    by_infiniband = [name for name in names if name.startswith("ib")]
    return by_infiniband or [name for name in names if not _is_local(name)] or list(names)


def _matching(names: Sequence[str], wanted: str, ports: bool = False) -> list[str]:
    """NCCL's way to name devices: beginnings of names with commas, whole names after ``=``, all others after ``^``;
    with ``ports``, ``:port`` may follow a name."""
    excluded, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    parts = _split(wanted.lstrip("^").removeprefix("="))
    parts = [part.split(":")[0] for part in parts] if ports else parts
    named = [name for name in names if any(name == part if exact else name.startswith(part) for part in parts)]
    return [name for name in names if name not in named] if excluded else named


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _ports(folder: Path) -> list[dict[str, str]]:
    """Each port of each device: ``{"device": "mlx5_0", "port": "1", "state": "ACTIVE", "rate": ..., "link": ...}``."""
    found = []
    for device in _listed(folder):
        for port in _listed(folder / device / "ports"):
            at = folder / device / "ports" / port
            state = _read(at / "state").rpartition(":")[2].strip()
            found.append(
                {
                    "device": device,
                    "port": port,
                    "state": state,
                    "rate": _read(at / "rate"),
                    "link": _read(at / "link_layer"),
                }
            )
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # some files are for root only
        return ""
