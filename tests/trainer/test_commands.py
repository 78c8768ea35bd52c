"""``python -m lightning_zero`` as users call it: the ranks that it starts are processes of their own."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from lightning_zero.cli.self_test import train_and_compare
from tests.ranks.pool import Ranks


def command(monkeypatch: pytest.MonkeyPatch, home: Path, *arguments: str) -> int:
    """Run a command in a folder and return its status. tests/gpu covers machines with GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # this process may have looked for some before
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.chdir(home)
    monkeypatch.setattr("sys.argv", ["lightning_zero", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lightning_zero", run_name="__main__", alter_sys=True)
    return int(ended.value.code or 0)


def test_what_the_doctor_trains_equals_plain_training(ranks: Ranks) -> None:
    for found in ranks.run(2, train_and_compare, torch.device("cpu"), deadline=60):
        assert found["equal"]
        assert 0 < found["largest_difference"] < 1e-4, "shards add in another order: exactly the same is not compared"
        assert found["ranks"] == 2
        assert found["losses"][-1] < found["losses"][0]
        assert set(found["transports"]) == {"weights", "gradients"}


@pytest.mark.slow
def test_the_doctor_trains_on_two_ranks_and_is_content(
    native_library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = command(monkeypatch, tmp_path, "doctor", "--json")
    shown = capsys.readouterr().out
    assert status == 0, shown
    facts = json.loads(shown[shown.index("{") :])
    assert facts["ok"] is True
    assert facts["to_fix"] == []
    test = facts["self_test"]
    assert test["equal"]
    assert 0 < test["largest_difference"] < 1e-4, "shards add in another order: exactly the same is not compared"
    assert test["ranks"] == 2
    assert test["losses"][-1] < test["losses"][0]
    assert set(test["transports"]) == {"weights", "gradients"}
    assert facts["versions"]["torch"]
