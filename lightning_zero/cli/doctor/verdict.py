"""What is to be mended, the worst first; and what only costs something. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["notes", "to_mend"]

FEWEST_FILES = 1024
LEAST_SHARED_GIB = 0.25  # Docker gives 64 MiB, which NCCL and data loaders' workers have run out of


def to_mend(facts: Mapping[str, Any]) -> list[str]:
    """Each says what is wrong and what to do. Empty: a training will run.

    Args:
        facts: by section, as :mod:`lightning_zero.cli.doctor.command` gathers them; ``self_test`` may be missing, and
            ``hosts`` is, where no launcher has started several processes.
    """
    executor, caches, system = facts["executor"], facts["caches"], facts["system"]
    found = []
    if not executor["built"] and executor["compiler_version"] is None:
        found.append(
            f"The C++ executor is not built, and the compiler {executor['compiler']!r} does not run. Install g++ 10 or "
            "newer, set CXX to a C++20 compiler, or set LIGHTNING_ZERO_CACHE to a cache that was filled by "
            "`python -m lightning_zero build`."
        )
    own = caches["executor"]
    if not executor["built"] and not own["writable"]:
        found.append(
            f"The C++ executor is not built, and its cache {own['path']} cannot be written. Set LIGHTNING_ZERO_CACHE "
            "to a writable directory of your own."
        )
    if facts.get("build_error"):
        found.append(facts["build_error"])
    for name, variable in (("inductor", "TORCHINDUCTOR_CACHE_DIR"), ("triton", "TRITON_CACHE_DIR")):
        if not caches[name]["writable"]:
            found.append(f"{caches[name]['path']} cannot be written. Set {variable} to a writable directory.")
    if system["open_files"] < FEWEST_FILES:
        found.append(
            f"A process may open {system['open_files']} files, which sockets of many ranks and data loaders exceed. "
            f"Run `ulimit -n {max(FEWEST_FILES, min(system['open_files_at_most'], 65536))}` before training."
        )
    if missing := (facts.get("compilation") or {}).get("missing"):
        found.append(
            f"torch {facts['versions']['torch']} lacks {missing[0]}, which compiled strategies need. Install torch "
            f"{facts['compilation']['tested_with_torch']}, or use strategy='zero3'."
        )
    found += _not_there(facts["network"])
    found += [line for line in (facts.get("hosts") or {}).get("to_mend", []) if line not in found]
    test = facts.get("self_test") or {}
    if test.get("failed"):
        found.append(f"The self-test failed: {test['failed']}")
    return found


def notes(facts: Mapping[str, Any]) -> list[str]:
    """What works, and might work better."""
    system, found = facts["system"], []
    compilation = facts.get("compilation") or {}
    if compilation.get("left_out"):
        found.append(
            f"torch {facts['versions']['torch']} is not one of those tested ({compilation['tested_with_torch']}), and "
            f"left out with it: {'; '.join(compilation['left_out'])}."
        )
    total = system["shared_memory_gib"]
    if total is not None and total < LEAST_SHARED_GIB:
        found.append(
            f"/dev/shm holds {total:g} GiB, which NCCL and data loaders' workers share. In a container give it more: "
            "`docker run --shm-size=8g`, or --ipc=host."
        )
    if not facts["executor"]["built"] and not facts.get("build_error"):
        found.append(
            "The C++ executor will be built at the first training; `python -m lightning_zero build` does it now."
        )
    return found + _about_networks(facts["network"], facts["variables"]) + (facts.get("hosts") or {}).get("notes", [])


def _not_there(network: Mapping[str, Any]) -> list[str]:
    """What variables name and this host lacks."""
    interfaces = ", ".join(network["interfaces"]) or "none"
    devices = ", ".join(sorted({port["device"] for port in network["infiniband"]})) or "none"
    there = {
        "NCCL_SOCKET_IFNAME": f"network interfaces with an address: {interfaces}",
        "GLOO_SOCKET_IFNAME": f"network interfaces with an address: {interfaces}",
        "NCCL_IB_HCA": f"InfiniBand devices: {devices}",
    }
    return [
        f"{variable} names {value}, which this host does not have ({there[variable]}). Unset it, or name one of these."
        for variable, value in network["missing"].items()
    ]


def _about_networks(network: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    """What slows several hosts, or GPUs of one, down."""
    found = []
    if not network["other_hosts_reachable"]:
        own = ", ".join(network["interfaces"]) or "none"
        found.append(
            f"No other host can reach this one: its interfaces with an address are {own}. That is "
            "enough for one host; for several, start the container with --network=host."
        )
    asleep = [port for port in network["infiniband"] if port["state"] != "ACTIVE"]
    if asleep:
        ports = ", ".join(f"{port['device']}:{port['port']} ({port['state'] or 'unknown'})" for port in asleep)
        found.append(f"InfiniBand ports that are not active: {ports}. NCCL leaves them out.")
    by_sockets = variables.get("NCCL_IB_DISABLE", "0") != "0" or variables.get("NCCL_NET", "").lower() == "socket"
    if by_sockets and len(asleep) < len(network["infiniband"]):
        found.append(
            "There are InfiniBand devices, and NCCL_IB_DISABLE or NCCL_NET keeps NCCL from using them: hosts talk by "
            "TCP, several times slower."
        )
    if variables.get("NCCL_P2P_DISABLE", "0") != "0":
        found.append(
            "NCCL_P2P_DISABLE is set: NCCL's collectives between GPUs of this host go through the host's memory."
        )
    return found
