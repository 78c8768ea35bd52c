"""Average weights as shards; validation and checkpoints get the values of DDP."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.helpers.lightning_modules import Averaged
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    RTOL,
    WIDTH,
    check_captured,
    close,
    make_loader,
    make_trainer,
    whole_state,
)
from tests.ranks.pool import Ranks

AVERAGES: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.6, update_starting_at_step=1),
    "late": lambda: EMAWeightAveraging(decay=0.6, update_starting_at_step=4),  # of which the first epoch sees nothing
    "mean": lambda: WeightAveraging(),
    "parameters only": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.6), use_buffers=False),
}


class OwnValues(Averaged):
    """Each rank draws its own initial values; those of rank 0 are everybody's."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for param in self.parameters():
                param.add_(0.1 * dist.get_rank())


class HoldsWeights(Averaged):
    """Reads weights before validation puts the averages in their place, keeps them and edits them."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.held = [self.net[0].weight, self.net[4].weight]
        with torch.no_grad():
            for weight in self.held:
                weight.mul_(0.9)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.held.append(self.net[4].weight)


def _averaged(kind: str, name: str, home: str, make: Any = Averaged, **arguments: Any) -> dict[str, Any]:
    """Two epochs with a checkpoint; then two more from that checkpoint, in a new module."""
    out: dict[str, Any] = {}
    folder = Path(home) / kind
    path = None
    for part, epochs in (("first", 2), ("resumed", 4)):
        module, checkpoint = make(), ModelCheckpoint(folder / part, monitor="val_loss", save_last=True)
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
@pytest.mark.exhaustive_variants("eager-mean", "eager-parameters only")
def test_averages_equal_ddps(ranks: Ranks, tmp_path: Path, kind: str, name: str) -> None:
    for result in ranks.run(2, _averaged_under, ["ddp", kind], name, str(tmp_path)):
        ours, ddp = result[kind], result["ddp"]
        assert_close_relative(ours, ddp, 3 * RTOL)
        assert len(ddp["first"]["validated"]) == 2 * 3
        weight = "net.0.weight"
        assert not torch.equal(ddp["first"]["average"][weight], ddp["first"]["current"][weight])


def _averaged_from_own_values(name: str, home: str) -> list[dict[str, Any]]:
    return [_averaged("ddp", name, home), _averaged("eager", name, home, OwnValues)]


def test_averages_start_from_the_first_ranks_values(ranks: Ranks, tmp_path: Path) -> None:
    """Validate the weights themselves before there is an average."""
    for ddp, ours in ranks.run(2, _averaged_from_own_values, "late", str(tmp_path)):
        assert_close_relative(ours, ddp, 3 * RTOL)


@pytest.mark.parametrize(
    ("kind", "gather_transport"),
    [("eager", "auto"), pytest.param("compiled", "auto", marks=pytest.mark.slow), ("eager", "collective")],
)
@pytest.mark.exhaustive_variants("compiled-auto", "eager-collective")
def test_weights_that_are_held_do_not_undo_an_exchange(
    ranks: Ranks, tmp_path: Path, kind: str, gather_transport: str
) -> None:
    arguments = {"make": HoldsWeights, "gather_transport": gather_transport}
    for result in ranks.run(2, _averaged_under, ["ddp", kind], "ema", str(tmp_path), **arguments):
        assert_close_relative(result[kind], result["ddp"], 3 * RTOL)


class ByHand(pl.Callback):
    """Callback as users wrote it before Lightning had one."""

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
    """Grows in a hook after the callbacks' hook."""

    def setup(self, stage: str) -> None:
        self.more = nn.Linear(WIDTH, WIDTH)


def _refused() -> list[str]:
    messages = []
    for callback, make, error in (
        (StochasticWeightAveraging(swa_lrs=0.1), Averaged, MisconfigurationException),
        (EMAWeightAveraging(), Late, MisconfigurationException),
    ):
        module = make()
        try:
            make_trainer("eager", callbacks=[callback]).fit(module, make_loader("eager", 1))
        except error as refusal:
            messages.append(str(refusal))
        close(module)
    return messages


def test_averages_that_cannot_be_made_are_refused(ranks: Ranks) -> None:
    for swa, late in ranks.run(2, _refused):
        assert "StochasticWeightAveraging is not supported" in swa
        assert "Use lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging" in swa
        assert "'more.bias' is only in one of module and copy (2 such)" in late


def _again(*kinds: str) -> dict[str, Any]:
    """Use the module and callback in a second Trainer: the callback copies a sharded module."""
    out = {}
    for kind in kinds:
        module, callback = Averaged(), EMAWeightAveraging(decay=0.6)
        for _ in range(2):
            trainer = make_trainer(kind, callbacks=[callback])
            trainer.fit(module, make_loader(kind, 3), make_loader(kind, 2, seed=1))
        copied = copy.deepcopy(trainer.callbacks)[-1] if kind == "eager" else callback
        assert isinstance(copied, EMAWeightAveraging)
        state = copied._average_model.state_dict()
        out[kind] = list(module.validated), whole_state(module), state
        if kind == "eager":
            pickled = pickle.loads(pickle.dumps(callback._average_model.module))
            assert_close_relative(dict(pickled.state_dict()), dict(copied._average_model.module.state_dict()), 0.0)
            trainer.validate(module, make_loader(kind, 2, seed=1), verbose=False)  # which swaps once more
            assert_close_relative(whole_state(module), out[kind][1], 0.0)
        close(module)
    return out


def test_a_module_is_averaged_in_a_second_fit_and_averages_can_be_copied(ranks: Ranks) -> None:
    for result in ranks.run(2, _again, "ddp", "eager"):
        assert_close_relative(result["eager"], result["ddp"], 3 * RTOL)
