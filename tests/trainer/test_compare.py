"""``python examples/benchmarks/compare`` as users call it, and the ranks that it starts."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from compare.job import Job
from compare.rank import train
from lightning_zero.cli import models
from lightning_zero.cli.models import SIZES
from tests.ranks.pool import REPO, Ranks


def _peers(names: tuple[str, ...]) -> list[Any]:
    job = Job("", "tiny", batch=1, length=16, steps=6, warm=2, precision="32-true", backend="aot_eager", clip=1.0)
    with patch.dict(SIZES, tiny=(32, 1, 2, 48)), patch.object(models, "VOCABULARY", 64):
        return [train(replace(job, peer=name)) for name in names]


@pytest.mark.exhaustive  # of the benchmarks alone; test_ours_is_compared_with_others trains one of them
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


@pytest.mark.slow
def test_ours_is_compared_with_others(
    native_library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "line.py").write_text(MODEL)
    asked = ["line.py:Line", "--only", "zero3_compile,fsdp", "--ranks", "1", "--steps", "6", "--warm", "2"]
    asked += ["--backend", "aot_eager", "--limit", "300", "--out", "out"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # this process may have looked for some before
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare", *asked])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPO / "examples" / "benchmarks" / "compare"), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    ours, fsdp = found["rows"]
    assert ours["failed"] == ""
    assert ours["ms"] > 0
    assert ours["ranks"] == ours["ratio"] == 1
    assert fsdp["failed"] == "needs GPUs"
    assert [path.suffix for path in (tmp_path / "out").glob("chart.*")] in (["." + kind] for kind in ("png", "svg"))
