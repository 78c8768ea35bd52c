"""Lightning's ``BaseFinetuning`` callbacks (``BackboneFinetuning``), over shards.

They leave out parameters that the optimizer has already, and recognise these by their values. Shards of different
parameters may be equal on one rank and not on another, above all where they are nothing but padding: ranks would end up
with different parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_zero.engine import Engine

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["compare_shards_by_identity"]


def compare_shards_by_identity(trainer: pl.Trainer, engine: Engine) -> None:
    """Makes the Trainer's finetuning callbacks compare parameters by identity. Harmless when repeated."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            callback.__dict__.pop("on_train_epoch_start", None)  # of an earlier engine
            callback.__dict__["on_train_epoch_start"] = _IdentityEqual(engine, callback.on_train_epoch_start)


class _IdentityEqual(TorchFunctionMode):
    """Calls a hook; inside, ``torch.equal`` of two shards says whether they are the same parameter's."""

    def __init__(self, engine: Engine, hook: Callable[..., None]) -> None:
        super().__init__()
        self._engine = engine
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        with self:
            self._hook(*args)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.equal and len(args) == 2 and all(self._engine.sharder.find(arg) for arg in args):
            return args[0] is args[1]
        return func(*args, **(kwargs or {}))
