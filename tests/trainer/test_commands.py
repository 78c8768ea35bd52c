"""``python -m lightning_zero`` as users call it."""

import json
from pathlib import Path

import pytest

from tests.helpers.command import run


def test_the_doctor_trains_on_two_ranks_and_is_content(
    native_library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # tests/gpu/test_doctor.py is for machines that have some
    done = run("-m", "lightning_zero", "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    facts = json.loads(done.stdout[done.stdout.index("{") :])
    assert facts["ok"] is True
    assert facts["to_mend"] == []
    test = facts["self_test"]
    assert test["equal"]
    assert 0 < test["largest_difference"] < 1e-4, "shards add in another order: exactly the same is not compared"
    assert test["ranks"] == 2
    assert test["losses"][-1] < test["losses"][0]
    assert set(test["transports"]) == {"weights", "gradients"}
    assert facts["versions"]["torch"]
