"""Test the problems that the doctor finds: the worst is first, and each names its fix."""

import io
import json
from argparse import Namespace
from copy import deepcopy
from typing import Any

import pytest

from lightning_zero.cli import doctor
from lightning_zero.cli.doctor import gather_facts, notes, to_fix
from lightning_zero.cli.main import main
from lightning_zero.cli.status_line import StatusLine
from lightning_zero.errors import NativeBuildError

FINE: dict[str, Any] = {
    "versions": {"torch": "2.99"},
    "compilation": {"tested_with_torch": "2.13", "tested": True, "left_out": [], "missing": []},
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
    """`caches__triton={...}` replaces the inner value."""
    facts = deepcopy(FINE)
    for path, value in changes.items():
        *sections, name = path.split("__")
        inside = facts
        for section in sections:
            inside = inside[section]
        inside[name] = value
    return facts


def test_where_all_is_well_there_is_nothing_to_fix_or_note() -> None:
    assert to_fix(FINE) == []
    assert notes(FINE) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"build_error": "it does not compile"}, "it does not compile"),
        ({"compilation__missing": ["torch._x.y", "torch._z"]}, "has no torch._x.y, which lightning_zero needs"),
        ({"system__open_files": 256}, "Run `ulimit -n 20000`"),
        (
            {"network__missing": {"NCCL_SOCKET_IFNAME": "ens1"}},
            "NCCL_SOCKET_IFNAME names ens1, which this host does not have (network interfaces with an address: lo, eth0)",
        ),
        ({"network__missing": {"NCCL_IB_HCA": "=mlx5_9"}}, "(InfiniBand devices: mlx5_0). Unset it"),
        ({"hosts": {"to_fix": ["torch is not the same"]}}, "torch is not the same"),
        ({"self_test": {"failed": "rank 1 ended"}}, "The self-test failed: rank 1 ended"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    [found] = to_fix(with_(**changes))
    assert words in found


def test_the_reason_comes_before_what_follows_from_it() -> None:
    found = to_fix(with_(build_error="the compiler does not run", self_test={"failed": "no executor"}))
    assert "compiler" in found[0]
    assert "self-test" in found[1]


def test_an_untested_torch_is_noted_also_if_all_optimizations_fit_it() -> None:
    [note] = notes(with_(compilation__tested=False))
    assert note == "torch 2.99 is not one of those tested (2.13)."
    left_out = ["layers once (it has no torch._x)"]
    assert [notes(with_(compilation__left_out=left_out)), notes(with_(compilation__tested=False))] == [
        ["Optimizations that do not fit torch 2.99: layers once (it has no torch._x)."],
        [note],
    ]


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
    assert to_fix(with_(**changes)) == []


def test_variables_that_leave_things_on_are_no_news() -> None:
    assert notes(with_(variables={"NCCL_IB_DISABLE": "0", "NCCL_P2P_DISABLE": "0", "NCCL_NET": "IB"})) == []


def test_what_is_gathered_here_is_what_the_diagnosis_reads() -> None:
    assert isinstance(to_fix(gather_facts()), list)


def test_an_executor_that_cannot_be_built_is_what_is_to_be_fixed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(report: Any) -> None:
        raise NativeBuildError("the compiler 'g++' does not run")

    monkeypatch.setattr("lightning_zero.cli.doctor.build", build)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert shown.endswith("\nto fix: the compiler 'g++' does not run\n")
    assert "devices" in shown
    assert "compilation" in shown
    assert main(["doctor", "--no-self-test", "--json"]) == 0, "nothing is built"
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"]
    assert facts["devices"]


def test_slow_parts_are_named_while_they_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, named = StatusLine("doctor", io.StringIO()), {}

    def part(name: str, result: Any) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            named[name] = status._text
            return result

        monkeypatch.setattr(doctor, name, call)

    part("gather_facts", with_())
    part("build", None)
    part("self_test", {"failed": ""})
    assert doctor.run(Namespace(no_self_test=False, timeout=1.0, json=True), status) == 0
    assert named == {
        "gather_facts": "looking at this machine",
        "build": "building the C++ executor",
        "self_test": "training a tiny model on all devices",
    }
    assert json.loads(capsys.readouterr().out)["ok"]
