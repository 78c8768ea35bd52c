"""The Trainer's precision, carried over to shards."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lightning_zero import ZeroStrategy
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import Regression, close, global_losses, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks


def _plugins() -> dict[str, Any]:
    found = {}
    for precision in ("32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"):
        plugin = make_trainer("eager", precision=precision).precision_plugin
        found[precision] = (type(plugin).__name__, [cls.__name__ for cls in type(plugin).__mro__], plugin.precision)
        assert _plugin_to_compute_dtype(plugin) is _plugin_to_compute_dtype(
            make_trainer("ddp", precision=precision).precision_plugin
        )
    return found


def test_each_precision_gets_the_same_kind_of_plugin(ranks: Ranks) -> None:
    for found in ranks.run(1, _plugins):
        for precision, base in (
            ("32-true", Precision),
            ("bf16-mixed", MixedPrecision),
            ("bf16-true", HalfPrecision),
            ("16-true", HalfPrecision),
            ("64-true", DoublePrecision),
        ):
            name, bases, kept = found[precision]
            assert name.startswith("Zero")
            assert base.__name__ in bases
            assert kept == precision


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_throughput_monitor_knows_the_dtype() -> None:
    for plugin, dtype in (
        (Precision(), torch.float32),
        (MixedPrecision("bf16-mixed", "cpu"), torch.bfloat16),
        (MixedPrecision("16-mixed", "cuda"), torch.float16),
        (HalfPrecision("bf16-true"), torch.bfloat16),
        (HalfPrecision("16-true"), torch.float16),
        (DoublePrecision(), torch.float64),
    ):
        ours = ZeroStrategy(precision_plugin=plugin).precision_plugin
        assert type(ours) is not type(plugin)
        assert _plugin_to_compute_dtype(ours) is _plugin_to_compute_dtype(plugin) is dtype
        assert isinstance(ours, type(plugin))


class Own(Precision):
    """A user's."""


class TransformerEngine(Precision):
    """Stands for Lightning's, which cannot be made without the package."""

    precision: Any = "transformer-engine"


class OwnScaler(torch.amp.GradScaler):
    """Looks at its own rank's gradients only."""


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (TransformerEngine(), "precision='transformer-engine'.* TransformerEngine is not supported.*Choose '32-true'"),
        (Own(), "plugin Own is not supported"),
        (MixedPrecision("16-mixed", "cpu", OwnScaler("cpu")), "loss scaler OwnScaler decides on each rank by itself"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_plugins_are_refused_by_name(plugin: Precision, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        ZeroStrategy(precision_plugin=plugin)


def test_a_users_scaler_keeps_its_settings() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    ours = ZeroStrategy(precision_plugin=MixedPrecision("16-mixed", "cpu", scaler)).precision_plugin.scaler
    assert isinstance(ours, ShardedGradScaler)
    assert ours.state_dict() == scaler.state_dict()


class Overflowing(Regression):
    """The second batch overflows, on the last rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        return loss * (1e38 if batch_idx == 1 and self.trainer.is_last_rank else 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class _LastRank(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.is_last_rank = trainer.global_rank == trainer.world_size - 1


def _scaled(kind: str, name: str, path: str | None = None) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    module = Overflowing()
    trainer = make_trainer(
        kind,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        callbacks=[_LastRank()],
        gradient_clip_val=0.2,
        max_epochs=1 if path is None else 2,
    )
    trainer.fit(module, make_loader(kind, 6), ckpt_path=path)
    trainer.save_checkpoint(f"{name}.ckpt")
    out = {"losses": global_losses(kind, module), "scales": module.scales, "state": whole_state(module)}
    close(module)
    return out


def _with_a_scaler(kinds: list[str]) -> dict[str, Any]:
    runs: dict[str, Any] = {kind: _scaled(kind, kind) for kind in kinds}
    for source in kinds:
        for kind in kinds:
            runs[f"{kind} from {source}"] = _scaled(kind, "resumed", f"{source}.ckpt")
    runs["files"] = {kind: torch.load(f"{kind}.ckpt", weights_only=True) for kind in kinds}
    return runs


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.exhaustive_variants("3")
def test_loss_scaling_equals_ddps_and_is_kept_in_checkpoints(ranks: Ranks, world_size: int) -> None:
    """Gradients that overflow on one rank skip the step on all."""
    for runs in ranks.run(world_size, _with_a_scaler, ["ddp", "eager"]):
        assert runs["ddp"]["scales"] == [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0]
        assert_close_relative(runs["eager"], runs["ddp"], 1e-3)
        files = runs["files"]
        assert files["eager"]["MixedPrecision"] == files["ddp"]["MixedPrecision"]
        assert files["ddp"]["MixedPrecision"]["scale"] == 1024.0
        assert files["eager"].keys() == files["ddp"].keys()
        expected = runs["ddp from ddp"]
        assert expected["scales"][0] == 1024.0
        assert expected["scales"][2] == 512.0
        for name in ("eager from ddp", "ddp from eager", "eager from eager"):
            assert_close_relative(runs[name], expected, 1e-3, what=name)
