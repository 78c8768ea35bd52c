"""Train until a SIGTERM to the process that started the others. Run by test_sigterm.py."""

import os
import signal
import sys

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero import ZeroStrategy
from tests.trainer.launched import Model, Write


class Ended(pl.Callback):
    def __init__(self, results: str) -> None:
        self.results = Write(results)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, idx: int) -> None:
        if trainer.global_step == 2:  # after one epoch
            self.results.write(trainer, module)
        if trainer.global_step == 5 and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    home, results, state_dict_type = sys.argv[1:]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ZeroStrategy(compile=False, state_dict_type=state_dict_type, async_save=True),
        max_epochs=1000,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Ended(results),
            ModelCheckpoint(home, "{step}", save_on_exception=True, save_last=True, every_n_epochs=999),
        ],
    )
    trainer.fit(Model(), ckpt_path="last")
