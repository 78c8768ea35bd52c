"""Checkpoints on GPUs: a save during training has the values of its call, to the bit."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_zero import ZeroStrategy
from tests.helpers.noted_saves import NotedSaves
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


def _fit(home: str, options: dict[str, Any], precision: Any) -> int:
    rng = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(STEPS * 4, WIDTH, generator=rng))
    saves, module = NotedSaves(home, SAVED), Model()
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
    compared = saves.compare(options.get("state_dict_type") == "sharded")
    close(module)
    return compared


SHARDED = {"state_dict_type": "sharded"}
BESIDE = SHARDED | {"async_save": True}


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        pytest.param(BESIDE, "bf16-mixed", id="sharded, beside training"),
        pytest.param(BESIDE, "32-true", id="sharded, beside training, float32"),
        pytest.param(BESIDE | {"stage": 1}, "bf16-mixed", id="stage 1"),
        pytest.param(BESIDE | {"stage": 2}, "bf16-mixed", id="stage 2"),
        pytest.param(BESIDE | {"offload": ("optimizer",)}, "bf16-mixed", id="state on the host"),
        pytest.param(SHARDED, "bf16-mixed", id="sharded"),
        pytest.param({"async_save": True}, "bf16-mixed", id="full, beside training"),
    ],
)
def test_what_is_saved_is_what_was_there(ranks: Ranks, tmp_path: Path, options: dict[str, Any], precision: str) -> None:
    found = ranks.run(2, _fit, str(tmp_path), options, precision, backend="nccl", deadline=300)
    assert found[0] == len(SAVED) * 24 * 2


class SavesAhead(pl.Callback):
    """Gives the device two seconds of work, and then saves."""

    def __init__(self, home: str) -> None:
        self.path, self.waited = f"{home}/ahead.ckpt", True

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == SAVED[0]:
            torch.cuda._sleep(4_000_000_000)
            trainer.save_checkpoint(self.path)
            self.waited = torch.cuda.current_stream().query()


def _ahead(home: str) -> bool:
    data = TensorDataset(torch.randn(STEPS * 4, WIDTH))
    saves, module = SavesAhead(home), Model()
    trainer = pl.Trainer(
        strategy=ZeroStrategy(**BESIDE),
        **gpus_of_ranks(),
        precision="bf16-mixed",
        use_distributed_sampler=False,
        callbacks=[saves],
        max_steps=SAVED[0] + 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False)))
    close(module)
    return saves.waited


def test_a_save_beside_training_does_not_wait_for_what_the_device_was_given(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _ahead, str(tmp_path), backend="nccl", deadline=200) == [False, False]
