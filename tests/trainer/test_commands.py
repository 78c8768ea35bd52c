"""``python -m lightning_zero`` as users call it."""

import json
from pathlib import Path

import pytest
import torch

from lightning_zero.cli.doctor.rank import train_and_compare
from tests.helpers.command import run
from tests.ranks.pool import Ranks


def test_what_the_doctor_trains_equals_plain_training(ranks: Ranks) -> None:
    for found in ranks.run(2, train_and_compare, torch.device("cpu"), deadline=60):
        assert found["equal"]
        assert 0 < found["largest_difference"] < 1e-4, "shards add in another order: exactly the same is not compared"
        assert found["ranks"] == 2
        assert found["losses"][-1] < found["losses"][0]
        assert set(found["transports"]) == {"weights", "gradients"}


@pytest.mark.slow
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


@pytest.mark.slow
def test_bench_sets_ours_beside_ddp(native_library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    few = ["--steps", "6", "--warm", "2", "--length", "16", "--batch", "1", "--backend", "aot_eager", "--limit", "100"]
    done = run(
        "-m", "lightning_zero", "bench", "tiny", "--only", "zero3_compile,ddp,fsdp", *few, "--out", "out", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    ours, ddp, fsdp = found["rows"]
    for row in (ours, ddp):
        assert row["failed"] == ""
        assert row["ms"] > 0
        assert row["ranks"] == 2
    assert ours["counters"]["gathers"] > 0
    assert ours["last_loss"] == pytest.approx(ddp["last_loss"], abs=1e-3), "they train the same model on the same data"
    assert ours["ratio"] == 1.0
    assert fsdp["failed"] == "needs GPUs"
    assert [path.suffix for path in (tmp_path / "out").glob("chart.*")] in (["." + kind] for kind in ("png", "svg"))
