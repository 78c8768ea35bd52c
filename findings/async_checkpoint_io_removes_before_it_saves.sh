#!/usr/bin/env bash
# One would guess: ModelCheckpoint(save_top_k=1) with Lightning's AsyncCheckpointIO leaves one file, as without it.
# It is so: the plugin queues saves, but removes at once. A file whose save is still queued is not there yet, so nothing
# is removed, and the queue writes the file afterwards. On a disk slower than the saving interval all files remain. The
# race has been known since 2022 (Lightning issue 14035); its size is the surprise: every file, not one now and then.
# It matters: a strategy that saves in the background must put removals into the same queue, or the disk fills.
# Seen: lightning 2.6.6, torch 2.13.0 (CPU build): ['step=4.ckpt'] without the plugin, all four files with it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 lightning==2.6.6 numpy
cat > "$work/async_io.py" <<'PY'
import os, tempfile, time
from importlib.metadata import version
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch).square().mean()
        self.log("step_number", float(self.global_step), on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SlowIO(TorchCheckpointIO):
    """As a network disk: a save takes half a second."""

    def save_checkpoint(self, *args, **kwargs):
        time.sleep(0.5)
        super().save_checkpoint(*args, **kwargs)


def files_left(asynchronous):
    with tempfile.TemporaryDirectory() as folder:
        plugin = AsyncCheckpointIO(SlowIO()) if asynchronous else SlowIO()
        keep_one = ModelCheckpoint(
            folder, "{step}", monitor="step_number", mode="max", save_top_k=1, every_n_train_steps=1
        )
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=4, plugins=[plugin], callbacks=[keep_one], logger=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )
        trainer.fit(Model(), DataLoader(torch.randn(8, 4), batch_size=2))
        return sorted(os.listdir(folder))


plain, queued = files_left(False), files_left(True)
print("lightning", version("lightning"), "torch", torch.__version__)
print("save_top_k=1:", plain)
print("save_top_k=1, AsyncCheckpointIO:", queued)
assert len(plain) == 1
assert len(queued) > 1, "AsyncCheckpointIO removes in order now"
PY
"$work/venv/bin/python" "$work/async_io.py" 2>"$work/log" || { tail -n 5 "$work/log"; exit 1; }
