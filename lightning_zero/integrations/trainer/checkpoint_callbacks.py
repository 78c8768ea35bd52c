"""What callbacks that save must know of these strategies: after an exception all ranks are needed, and a checkpoint
that is saved beside training has its name before anybody sees it.

``ModelCheckpoint`` looks for a file to find out whether a name is taken; of two best checkpoints of one name, the
second would take the place of the first, whose save has only begun.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero.checkpoint.sharded.folder import full_path
from lightning_zero.integrations.trainer.interrupted import synchronize_exception_saves

__all__ = ["patch_checkpoint_callbacks"]


def patch_checkpoint_callbacks(trainer: pl.Trainer) -> None:
    """Of all callbacks of this Trainer. Harmless when repeated. What users have put there instead stays."""
    synchronize_exception_saves(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint):
            vars(callback).setdefault("file_exists", partial(_exists, callback))


def _exists(callback: Any, filepath: str | Path, trainer: pl.Trainer) -> bool:
    if type(callback).file_exists(callback, filepath, trainer):
        return True
    strategy: Any = trainer.strategy  # another one, where this is another Trainer's callback by now
    if not getattr(strategy, "saves_async", False):
        return False
    taken = trainer.is_global_zero and full_path(filepath) == strategy.saving_to()
    return bool(strategy.broadcast(taken))
