"""The one thing to mend: the worst comes first, and each says what to do."""

from copy import deepcopy
from typing import Any

import pytest

from lightning_zero.cli.doctor.command import gather
from lightning_zero.cli.doctor.verdict import notes, to_mend

FINE: dict[str, Any] = {
    "executor": {"built": True, "compiler": "g++", "compiler_version": None},
    "caches": {name: {"path": f"/{name}", "writable": True} for name in ("executor", "inductor", "triton")},
    "system": {"open_files": 20000, "open_files_at_most": 20000, "shared_memory_gib": 8.0},
    "network": {
        "interfaces": ["lo", "eth0"],
        "infiniband": [{"device": "mlx5_0", "port": "1", "state": "ACTIVE"}],
        "missing": {},
        "other_hosts_reachable": True,
    },
    "variables": {},
    "self_test": {"failed": ""},
}


def with_(**changes: Any) -> dict[str, Any]:
    """`caches__triton={...}` changes what is inside."""
    facts = deepcopy(FINE)
    for path, value in changes.items():
        *sections, name = path.split("__")
        inside = facts
        for section in sections:
            inside = inside[section]
        inside[name] = value
    return facts


def test_where_all_is_well_there_is_nothing_to_mend_or_note() -> None:
    assert to_mend(FINE) == []
    assert notes(FINE) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"executor__built": False}, "compiler 'g++' does not run. Install g++ 10"),
        (
            {"executor__built": False, "executor__compiler_version": "12", "caches__executor__writable": False},
            "/executor cannot be written. Set LIGHTNING_ZERO_CACHE",
        ),
        ({"build_error": "it does not compile"}, "it does not compile"),
        ({"caches__inductor__writable": False}, "Set TORCHINDUCTOR_CACHE_DIR"),
        ({"caches__triton__writable": False}, "Set TRITON_CACHE_DIR"),
        ({"system__open_files": 256}, "Run `ulimit -n 20000`"),
        (
            {"network__missing": {"NCCL_SOCKET_IFNAME": "ens1"}},
            "NCCL_SOCKET_IFNAME names ens1, which this host does not have (network interfaces with an address: lo, eth0)",
        ),
        ({"network__missing": {"NCCL_IB_HCA": "=mlx5_9"}}, "(InfiniBand devices: mlx5_0). Unset it"),
        ({"hosts": {"to_mend": ["torch is not the same"]}}, "torch is not the same"),
        ({"self_test": {"failed": "rank 1 ended"}}, "The self-test failed: rank 1 ended"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    [found] = to_mend(with_(**changes))
    assert words in found


def test_a_built_executor_needs_neither_compiler_nor_a_cache_to_write() -> None:
    assert to_mend(with_(caches__executor__writable=False)) == []


def test_the_reason_comes_before_what_follows_from_it() -> None:
    found = to_mend(with_(executor__built=False, self_test={"failed": "no executor"}))
    assert "compiler" in found[0]
    assert "self-test" in found[1]


def test_small_shared_memory_is_noted() -> None:
    [note] = notes(with_(system__shared_memory_gib=0.06))
    assert "--shm-size" in note


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network__other_hosts_reachable": False}, "--network=host"),
        ({"network__infiniband": [{"device": "mlx5_0", "port": "1", "state": "DOWN"}]}, "mlx5_0:1 (DOWN)"),
        ({"variables__NCCL_IB_DISABLE": "1"}, "hosts talk by TCP"),
        ({"variables__NCCL_NET": "Socket"}, "hosts talk by TCP"),
        ({"variables__NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE is set"),
        ({"hosts": {"notes": ["NCCL_DEBUG is not the same"]}}, "NCCL_DEBUG"),
    ],
)
def test_what_slows_several_hosts_down_is_noted(changes: dict[str, Any], words: str) -> None:
    [note] = notes(with_(**changes))
    assert words in note
    assert to_mend(with_(**changes)) == []


def test_variables_that_leave_things_on_are_no_news() -> None:
    assert notes(with_(variables={"NCCL_IB_DISABLE": "0", "NCCL_P2P_DISABLE": "0", "NCCL_NET": "IB"})) == []


def test_what_is_gathered_here_is_what_the_verdict_reads() -> None:
    assert isinstance(to_mend(gather()), list)


def test_a_folder_that_is_not_there_is_writable_where_it_can_be_made(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_CACHE", str(tmp_path / "a" / "b"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "b"))
    caches = gather()["caches"]
    assert caches["executor"] == {"path": str(tmp_path / "a" / "b"), "writable": True}
    assert caches["triton"]["writable"] is False
    assert not (tmp_path / "a").exists(), "somebody who only looks makes nothing"
