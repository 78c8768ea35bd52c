"""Every hook of the LightningModule and of callbacks is called when, and as often as, under DDP."""

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.helpers.trainer import Regression, close, make_loader, make_trainer
from tests.ranks.pool import Ranks

# overriding these has a meaning of its own
LEFT_OUT = {"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "configure_sharded_model"}
MODULE_HOOKS = sorted(
    {name for cls in (CheckpointHooks, DataHooks, ModelHooks) for name in vars(cls) if not name.startswith("_")}
    - LEFT_OUT
    | {"training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "configure_callbacks"}
    | {"backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "toggle_optimizer", "zero_grad"}
    | {"configure_gradient_clipping", "clip_gradients"}
)
CALLBACK_HOOKS = sorted(name for name in vars(pl.Callback) if name[0] != "_" and name not in ("state_key",))


def _recorded(base: type, hooks: list[str], prefix: str) -> Any:
    """Records each hook called on it, and calls the original."""

    def hook(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(prefix + name)
            return getattr(super(cls, self), name)(*args, **kwargs)

        return call

    cls = type(f"Recorded{base.__name__}", (base,), {name: hook(name) for name in hooks})
    return cls


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "epoch"}]


RecordedModule = _recorded(Scheduled, MODULE_HOOKS, "module.")
RecordedCallback = _recorded(pl.Callback, CALLBACK_HOOKS, "callback.")


class Failing(RecordedModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)


def _record(kind: str, stage: str) -> list[str]:
    module, callback = (Failing if stage == "failing" else RecordedModule)(), RecordedCallback()
    module.calls = callback.calls = calls = []
    trainer = make_trainer(
        kind,
        callbacks=[callback],
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        num_sanity_val_steps=1,
    )
    loader = make_loader(kind, 3)
    if stage in ("fit", "failing"):
        with pytest.raises(RuntimeError, match="on purpose") if stage == "failing" else nullcontext():
            trainer.fit(module, loader, make_loader(kind, 2))
    elif stage == "resume":
        trainer.fit(module, loader)
        trainer.save_checkpoint(f"{kind}.ckpt")
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader, ckpt_path=f"{kind}.ckpt")
    elif stage == "predict":
        trainer.predict(module, loader, return_predictions=False)
    else:
        getattr(trainer, stage)(module, loader, verbose=False)
    close(module)
    return calls


def _record_under(stage: str, *kinds: str) -> list[list[str]]:
    return [_record(kind, stage) for kind in kinds]


STAGES = {
    "fit": ["module.training_step", "module.configure_gradient_clipping", "callback.on_before_optimizer_step"],
    "validate": ["module.on_validation_model_eval", "callback.on_validation_batch_end"],
    "test": ["module.test_step", "callback.on_test_epoch_end"],
    "predict": ["module.transfer_batch_to_device", "callback.on_predict_end"],
    "resume": ["module.on_save_checkpoint", "module.on_load_checkpoint", "callback.state_dict"],
    "failing": ["callback.on_exception"],
}


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_are_called_as_under_ddp(ranks: Ranks, stage: str) -> None:
    for ddp, ours in ranks.run(2, _record_under, stage, "ddp", "eager"):
        assert set(STAGES[stage]) <= set(ddp)
        if stage == "resume":
            # Values load into existing shards only, so this is called after configure_optimizers().
            assert sorted(ours) == sorted(ddp)
            ours, ddp = ([call for call in calls if "load" not in call] for calls in (ours, ddp))
        assert ours == ddp
