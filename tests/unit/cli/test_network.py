"""Network interfaces and InfiniBand devices that variables name, on machines that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_zero.cli.hosts import has_address, network


def machine(tmp_path: Path, interfaces: str, **ports: str) -> Path:
    for name in interfaces.split():
        (tmp_path / "net" / name).mkdir(parents=True)
    for device, state in ports.items():
        port = tmp_path / "infiniband" / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    return tmp_path


def look(root: Path, without_address: str = "", **environment: str) -> dict[str, Any]:
    return network(root, lambda name: name not in without_address.split(), environment)


@pytest.mark.parametrize("interfaces", ["lo docker0 eth0 eth1", "lo eth0 ib0 ib1", "lo docker0", ""])
def test_other_hosts_reach_an_interface_that_is_not_local(tmp_path: Path, interfaces: str) -> None:
    found = look(machine(tmp_path, interfaces))
    assert found["interfaces"] == sorted(interfaces.split())
    assert found["other_hosts_reachable"] == ("eth0" in interfaces)
    assert found["missing"] == {}


@pytest.mark.parametrize(
    ("wanted", "there"),
    [
        ("eth", True),
        ("=eth1", True),
        ("=eth", False),
        ("^eth0,lo", True),
        ("^eth,lo", False),
        ("^=eth", True),
        ("bond0,eth1", True),
        ("bond0", False),
    ],
)
def test_interfaces_are_named_as_nccl_does(tmp_path: Path, wanted: str, there: bool) -> None:
    found = look(machine(tmp_path, "lo eth0 eth1"), NCCL_SOCKET_IFNAME=wanted)
    assert found["missing"] == ({} if there else {"NCCL_SOCKET_IFNAME": wanted})


def test_an_interface_without_an_address_is_as_good_as_none(tmp_path: Path) -> None:
    found = look(machine(tmp_path, "lo eth0"), "eth0", GLOO_SOCKET_IFNAME="lo,eth0")
    assert found["interfaces"] == ["lo"]
    assert not found["other_hosts_reachable"]
    assert found["missing"] == {"GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(
    ("wanted", "there"),
    [("mlx5", True), ("=mlx5_0:1,mlx5_7", True), ("^mlx5_1", True), ("=mlx5", False), ("^mlx5", False)],
)
def test_infiniband_devices_are_found_and_named(tmp_path: Path, wanted: str, there: bool) -> None:
    root = machine(tmp_path, "lo eth0", mlx5_0="4: ACTIVE", mlx5_1="1: DOWN")
    found = look(root, NCCL_IB_HCA=wanted)
    assert [(port["device"], port["port"], port["state"]) for port in found["infiniband"]] == [
        ("mlx5_0", "1", "ACTIVE"),
        ("mlx5_1", "1", "DOWN"),
    ]
    assert found["missing"] == ({} if there else {"NCCL_IB_HCA": wanted})


def test_the_loopback_of_this_machine_has_an_address() -> None:
    assert has_address("lo")
    assert not has_address("no-such-name")
