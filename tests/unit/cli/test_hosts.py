"""Test the comparison of hosts, and the inspection of networks that are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero.cli.hosts import MUST_BE_EQUAL, Job, compare_hosts, has_address, network, summarize
from lightning_zero.cli.local_ranks import run_ranks
from lightning_zero.errors import UnsupportedError
from lightning_zero.subprocess_main import program_without_lightning
from tests.helpers.ports import free_port

LAUNCHED = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}


def one(host: str, to_fix: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    versions = dict.fromkeys(MUST_BE_EQUAL, "1.0") | changes
    variables = {name: versions.pop(name) for name in list(versions) if name.startswith("NCCL")}
    return summarize(
        {"versions": versions, "variables": variables | {"CUDA_VISIBLE_DEVICES": host}}, host, to_fix or []
    )


def test_hosts_that_are_alike_have_nothing_to_fix() -> None:
    found = compare_hosts(3, {0: one("a"), 1: one("a"), 2: one("b")})
    assert found == {"heard": {"a": "ranks 0 to 1", "b": "rank 2"}, "to_fix": [], "notes": []}


@pytest.mark.parametrize("name", MUST_BE_EQUAL)
def test_versions_that_differ_are_named_with_their_hosts(name: str) -> None:
    [line] = compare_hosts(3, {0: one("a"), 1: one("b", **{name: "2.0"}), 2: one("b", **{name: None})})["to_fix"]
    assert f"{name} is not the same everywhere: 1.0 on a (rank 0); 2.0 on b (rank 1); none on b (rank 2)." in line


def test_who_says_nothing_is_named_first() -> None:
    found = compare_hosts(4, {0: one("a"), 2: one("b", torch="2.0")})["to_fix"]
    assert "Of 4 ranks, no report arrived from ranks 1, 3" in found[0]
    assert "torch" in found[1]


def test_what_another_host_has_to_fix_is_said_once_with_its_name() -> None:
    found = compare_hosts(3, {0: one("a"), 1: one("b", ["no compiler"]), 2: one("b", ["no compiler"])})
    assert found["to_fix"] == ["b: no compiler"]


def test_variables_of_nccl_that_differ_are_noted() -> None:
    [note] = compare_hosts(2, {0: one("a"), 1: one("b", NCCL_NET="IB")})["notes"]
    assert note == "NCCL_NET is not the same everywhere: none on a (rank 0); IB on b (rank 1)."


def test_launchers_are_known_by_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Job.from_environment({}) is None
    assert Job.from_environment(LAUNCHED | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert Job.from_environment(LAUNCHED) == Job(3, 8, 1, "node-a", 29500, False)
    assert Job.from_environment(LAUNCHED | {"TORCHELASTIC_USE_AGENT_STORE": "True"}) == Job(
        3, 8, 1, "node-a", 29500, True
    )
    slurm = {"JOB_ID": "17", "NTASKS": "8", "PROCID": "5", "LOCALID": "1", "NODEID": "1", "NODELIST": "node-[1-2]"}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    # Lightning sets MASTER_ADDR, and later tests would meet there.
    monkeypatch.setattr(os, "environ", os.environ | environment)
    assert Job.from_environment(environment) is None, "a batch script, whose tasks srun has not started"
    with pytest.raises(UnsupportedError, match="ntasks-per-node"):
        Job.from_environment(environment | {"SLURM_STEP_NUM_TASKS": "8"})
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    job = Job.from_environment(environment | {"SLURM_STEP_NUM_TASKS": "8"})
    assert (job.rank, job.world_size, job.local_rank, job.address) == (5, 8, 1, "node-1")


def test_rank_0_that_is_not_there_is_an_error_that_names_the_address() -> None:
    with pytest.raises(UnsupportedError, match=r"Rank 1 on b does not reach 127.0.0.1:\d+ .* within 1 s"):
        Job(1, 2, 0, "127.0.0.1", free_port(), served=False).gather(one("b"), 1.0)


def test_ranks_that_come_are_heard_and_others_are_left_out() -> None:
    port = free_port()
    later = f"""
import json
from lightning_zero.cli.hosts import Job
assert Job(1, 3, 0, "127.0.0.1", {port}, False).gather(json.loads(sys.argv[1]), 60.0) == {{}}
"""
    other = subprocess.Popen([sys.executable, "-c", program_without_lightning(later), json.dumps(one("b"))])
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("said", "")  # something else of the same store
        dist.PrefixStore("lightning_zero/doctor", store).wait(["1"])
        heard = Job(0, 3, 0, "127.0.0.1", port, served=True).gather(one("a"), 2.0)
    finally:
        assert other.wait(60) == 0
    assert heard == {0: one("a"), 1: one("b")}


CLAIMS = """
import os, sys
from lightning_zero.cli import doctor
from lightning_zero.cli.main import main
was = doctor.versions
doctor.versions = lambda: was() | {"torch": "2.11.0" if os.environ["RANK"] == "1" else "2.13.0"}
sys.exit(main(["doctor", "--no-self-test", "--json"]))
"""


@pytest.mark.exhaustive  # the tests above compare versions
def test_two_processes_that_claim_different_versions_of_torch() -> None:
    end = run_ranks(["-c", CLAIMS], 2, 120.0)
    assert end.status == (1, 0), end.outputs
    # With torch 2.15, triton prints more after it.
    facts, _ = json.JSONDecoder().raw_decode(end.outputs[0][end.outputs[0].index("{") :])
    assert "{" not in end.outputs[1], "rank 0 speaks for all"
    [line] = [line for line in facts["to_fix"] if line.startswith("torch is not")]
    assert "2.13.0 on" in line
    assert "2.11.0 on" in line
    assert "(rank 1)" in line


# -- network


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
