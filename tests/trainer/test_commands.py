"""``python -m lightning_zero`` as users call it: the ranks that it starts are processes of their own."""

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_zero.bench import decoder
from lightning_zero.bench.decoder import SIZES
from lightning_zero.bench.job import Job
from lightning_zero.bench.rank import train
from lightning_zero.cli.doctor.rank import train_and_compare
from tests.ranks.pool import Ranks


def command(monkeypatch: pytest.MonkeyPatch, home: Path, *arguments: str) -> int:
    """Its status; from that folder, as far as there are no GPUs: tests/gpu has tests for machines that have some."""
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
    assert facts["to_mend"] == []
    test = facts["self_test"]
    assert test["equal"]
    assert 0 < test["largest_difference"] < 1e-4, "shards add in another order: exactly the same is not compared"
    assert test["ranks"] == 2
    assert test["losses"][-1] < test["losses"][0]
    assert set(test["transports"]) == {"weights", "gradients"}
    assert facts["versions"]["torch"]


def _peers(names: tuple[str, ...]) -> list[Any]:
    job = Job("", "tiny", batch=1, length=16, steps=6, warm=2, precision="32-true", backend="aot_eager", clip=1.0)
    with patch.dict(SIZES, tiny=(32, 1, 2, 48)), patch.object(decoder, "VOCABULARY", 64):
        return [train(replace(job, peer=name)) for name in names]


@pytest.mark.exhaustive  # see unit/bench
def test_peers_train_the_same_model_on_the_same_data(ranks: Ranks) -> None:
    (ours, ddp), others = ranks.run(2, _peers, ("zero3_compile", "ddp"))
    assert others == [None, None]
    for row in (ours, ddp):
        assert row["ms"] > 0
        assert row["ranks"] == 2
    assert ours["counters"]["gathers"] > 0
    assert ours["last_loss"] == pytest.approx(ddp["last_loss"], abs=1e-3)


MODEL = """
import lightning.pytorch as pl
import torch


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(64, 4), 1)
"""


@pytest.mark.exhaustive  # see unit/bench
def test_bench_sets_ours_beside_others(
    native_library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "line.py").write_text(MODEL)
    asked = ["line.py:Line", "--only", "zero3_compile,fsdp", "--ranks", "1", "--steps", "6", "--warm", "2"]
    asked += ["--backend", "aot_eager", "--limit", "300", "--out", "out"]
    status = command(monkeypatch, tmp_path, "bench", *asked)
    assert status == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    ours, fsdp = found["rows"]
    assert ours["failed"] == ""
    assert ours["ms"] > 0
    assert ours["ranks"] == ours["ratio"] == 1
    assert fsdp["failed"] == "needs GPUs"
    assert [path.suffix for path in (tmp_path / "out").glob("chart.*")] in (["." + kind] for kind in ("png", "svg"))
