"""Averages of the weights are averages of shards; validation and checkpoints get what DDP's get."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lightning_zero
from tests.helpers.oracle import assert_close_relative
from tests.ranks.pool import Ranks
from tests.trainer.helpers import (
    RTOL,
    Regression,
    check_captured,
    close,
    make_loader,
    make_trainer,
    seeded,
    whole_state,
)

AVERAGES: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.6, update_starting_at_step=1),
    "mean": lambda: WeightAveraging(),
    "parameters only": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.6), use_buffers=False),
}


class Averaged(Regression):
    """With a buffer, a tied and a frozen parameter; notes what validation sees."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.tied = nn.Linear(6, 5)
        self.tied.weight = self.net[0].weight
        self.net[2].weight.requires_grad_(False)
        self.register_buffer("steps", torch.zeros(()))
        self.validated: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) + self.steps / 100
        self.log("val_loss", loss, sync_dist=True)
        self.validated.append(loss.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-2, eps=1e-3)


def _averaged(kind: str, name: str, home: str, **arguments: Any) -> dict[str, Any]:
    """Two epochs with a checkpoint; then two more from that checkpoint, in a new module."""
    out: dict[str, Any] = {}
    folder = Path(home) / kind
    path = None
    for part, epochs in (("first", 2), ("resumed", 4)):
        module, checkpoint = Averaged(), ModelCheckpoint(folder / part, monitor="val_loss", save_last=True)
        trainer = make_trainer(
            kind, max_epochs=epochs, callbacks=[AVERAGES[name](), checkpoint], enable_checkpointing=True, **arguments
        )
        loaders = make_loader(kind, 3), make_loader(kind, 2, seed=1)
        trainer.fit(module, *loaders, ckpt_path=path)
        check_captured(trainer)
        path = checkpoint.last_model_path
        saved = torch.load(path, weights_only=True)
        out[part] = {
            "validated": module.validated,
            "final": whole_state(module),
            "average": saved["state_dict"],
            "current": saved["current_model_state"],
            "more": saved["averaging_state"],
        }
        trainer.validate(module, loaders[1], verbose=False)
        out[part]["afterwards"] = trainer.callback_metrics["val_loss"].item()
        close(module)
    return out


def _averaged_under(kinds: list[str], *args: Any, **arguments: Any) -> dict[str, Any]:
    return {kind: _averaged(kind, *args, **arguments) for kind in kinds}


@pytest.mark.parametrize(("kind", "name"), [("captured", "ema"), ("eager", "mean"), ("eager", "parameters only")])
def test_averages_equal_ddps(ranks: Ranks, tmp_path: Path, kind: str, name: str) -> None:
    for result in ranks.run(2, _averaged_under, ["ddp", kind], name, str(tmp_path)):
        ours, ddp = result[kind], result["ddp"]
        assert_close_relative(ours, ddp, 3 * RTOL)
        assert len(ddp["first"]["validated"]) == 2 * 3
        weight = "net.0.weight"
        assert not torch.equal(ddp["first"]["average"][weight], ddp["first"]["current"][weight])


class ByHand(pl.Callback):
    """What people wrote before Lightning had a callback for it."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.average = [param.detach().clone() for param in module.parameters()]

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        for average, param in zip(self.average, module.parameters(), strict=True):
            average.lerp_(param.detach(), 0.4)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.swap(module)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.swap(module)

    def swap(self, module: pl.LightningModule) -> None:
        for average, param in zip(self.average, module.parameters(), strict=True):
            before = param.data.clone()
            param.data.copy_(average)
            average.copy_(before)


class Nested(Averaged):
    """The average is part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net, avg_fn=lambda a, b, n: 0.6 * a + 0.4 * b).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update_parameters(self.net)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.validated.append((self.average(batch[0]) - batch[1]).square().mean().item())


def _by_hand(kinds: list[str], nested: bool, **arguments: Any) -> dict[str, Any]:
    out = {}
    for kind in kinds:
        module = Nested() if nested else Averaged()
        trainer = make_trainer(kind, max_epochs=2, callbacks=[] if nested else [ByHand()], **arguments)
        trainer.fit(module, make_loader(kind, 4), make_loader(kind, 2, seed=1))
        check_captured(trainer)
        out[kind] = module.validated, whole_state(module)
        close(module)
    return out


@pytest.mark.parametrize(
    ("kind", "nested", "arguments"),
    [
        ("eager", False, {}),
        ("compiled", False, {}),
        ("captured", True, {}),
    ],
)
def test_averages_made_by_hand_equal_ddps(ranks: Ranks, kind: str, nested: bool, arguments: dict[str, Any]) -> None:
    for result in ranks.run(2, _by_hand, ["ddp", kind], nested, **arguments):
        assert_close_relative(result[kind], result["ddp"], 3 * RTOL)


class Late(Averaged):
    """Grows in a hook that comes after the callbacks'."""

    def setup(self, stage: str) -> None:
        self.more = nn.Linear(2, 2)


def _refused() -> list[str]:
    messages = []
    for callback, make, error in (
        (StochasticWeightAveraging(swa_lrs=0.1), Averaged, MisconfigurationException),
        (EMAWeightAveraging(), Late, MisconfigurationException),
        (EMAWeightAveraging(), Averaged, lightning_zero.UnsupportedError),
    ):
        module = make()
        try:
            for _ in range(2):
                make_trainer("eager", callbacks=[callback]).fit(module, make_loader("eager", 1))
        except error as refusal:
            messages.append(str(refusal))
        close(module)
    return messages


def test_averages_that_cannot_be_made_are_refused(ranks: Ranks) -> None:
    for swa, late, again in ranks.run(2, _refused):
        assert "StochasticWeightAveraging is not supported" in swa
        assert "Use lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging" in swa
        assert "'more.bias' is only in one of module and copy (2 such)" in late
        assert "cannot be copied" in again
        assert "lightning_zero.unshard(module)" in again
