"""The doctor on the GPUs of this machine finds them, trains on all, and reports replays."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.command import run

pytestmark = pytest.mark.gpu


def test_the_doctor_trains_on_all_devices_and_is_content(native_library: None, tmp_path: Path) -> None:
    done = run("-m", "lightning_zero", "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    facts = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert facts["ok"] is True
    assert len(facts["devices"]) == torch.cuda.device_count()
    assert facts["versions"]["driver"]
    assert facts["versions"]["nccl"]
    test = facts["self_test"]
    assert test["ranks"] == torch.cuda.device_count()
    assert test["backend"] == "nccl"
    assert test["equal"]
    assert test["optimizer_step_replayed"] == "yes"
    assert test["steps_replayed"] > 0
    # The announcement is right.
    assert (test["graphs_replayed"] > 0) == (test["forward_and_backward_replayed"] == "yes"), test
