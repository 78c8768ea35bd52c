"""Checkpoints on GPUs: what is saved beside training is what was there when it was asked for, to the bit."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.sharded.opened import OpenedFolder
from lightning_zero.engine import engine_of
from tests.helpers.trainer import close, gpus_of_ranks, seeded
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(2)

WIDTH, STEPS, SAVED = 2048, 40, (12, 20, 28)  # large enough that copies go on when the next step would write


class Model(pl.LightningModule):
    """Weights that change much in each step, and a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
        self.register_buffer("calls", torch.zeros(1 << 20))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Saves(pl.Callback):
    """Notes all values, then saves, at some steps."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.wanted: dict[int, tuple[dict[str, Tensor], Any]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step in SAVED:
            engine = engine_of(module)
            assert engine is not None
            optimizer = trainer.optimizers[0]
            self.wanted[trainer.global_step] = engine.model_state(), engine.optimizer_state(optimizer)
            trainer.save_checkpoint(f"{self.home}/{trainer.global_step}.ckpt")


def _fit(home: str, options: dict[str, Any], precision: Any) -> int:
    rng = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(STEPS * 4, WIDTH, generator=rng))
    saves, module = Saves(home), Model()
    trainer = pl.Trainer(
        strategy=ZeroStrategy(**options),
        **gpus_of_ranks(),
        precision=precision,
        use_distributed_sampler=False,
        callbacks=[saves],
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False)))
    compared = 0
    for step, (state, optimizer) in saves.wanted.items() if dist.get_rank() == 0 else ():
        path = f"{home}/{step}.ckpt"
        if options.get("state_dict_type") == "sharded":
            folder = OpenedFolder(path)
            assert folder.manifest is not None
            folder.check(folder.manifest.files)
            found = folder.state()
            model = {key: value.whole() for key, value in found["state_dict"].items()}
            names = found["optimizer_0"]["param_groups"][0]["params"]
            moments = {n: found["optimizer_0"]["state"][name] for n, name in enumerate(names)}
        else:
            file = torch.load(path)
            model, moments = file["state_dict"], file["optimizer_states"][0]["state"]
        assert model.keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(model[key].cpu(), value), (step, key)
        for number, entries in optimizer["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(moments[number][key].clone().cpu(), entries[key]), (step, number, key)
                compared += 1
    close(module)
    return compared


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize(
    "options",
    [
        {"state_dict_type": "sharded", "async_save": True},
        {"state_dict_type": "sharded"},
        {"async_save": True},
    ],
    ids=["sharded, beside training", "sharded", "full, beside training"],
)
def test_what_is_saved_is_what_was_there(ranks: Ranks, tmp_path: Path, options: dict[str, Any], precision: str) -> None:
    found = ranks.run(2, _fit, str(tmp_path), options, precision, backend="nccl", deadline=300)
    assert found[0] == len(SAVED) * 24 * 2
