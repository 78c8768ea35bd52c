"""The part of Fabric's strategy that fills checkpoints and reads them: plain files with whole values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint.checkpoints import Checkpoints
from lightning_zero.checkpoint.sharded.opened import checkpoint_kind
from lightning_zero.checkpoint.sharded.owned import materialize_extra_state
from lightning_zero.compat.lightning_private import convert_state
from lightning_zero.config import EngineConfig
from lightning_zero.engine import Engine, engine_of
from lightning_zero.integrations.fabric.module import unwrap_module
from lightning_zero.integrations.files import (
    BackgroundFileIO,
    FileIO,
    check_storage_options,
    load_file,
    report_progress_of,
    report_user_io,
)
from lightning_zero.integrations.folders import parted, read_on_all_ranks, read_folder

__all__ = ["FabricCheckpointing"]


class _LazyCheckpointIO(TorchCheckpointIO):
    """Gives a checkpoint, either kind, of which tensors are read when they are wanted."""

    def __init__(self, io: CheckpointIO, checkpoints: Checkpoints | None) -> None:
        self._io, self._checkpoints = io, checkpoints

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        own = self._checkpoints
        if own is None:  # nothing is set up
            return (
                read_folder(path, weights_only) if checkpoint_kind(path) == "folder" else load_file(self._io, path, weights_only)
            )
        if own.is_folder(path):
            return read_on_all_ranks(own, path, weights_only)
        return load_file(self._io, path, weights_only, own.together)


class FabricCheckpointing(ParallelStrategy):
    """For a strategy, which knows the engine of an optimizer, and the one that was set up last."""

    _engine: Engine | None
    _options: EngineConfig
    _load_source: object = "a state dict"  # or where it comes from

    @property
    def _sharded(self) -> bool:
        return self._options.state_dict_type == "sharded"

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = BackgroundFileIO() if self._options.async_save else FileIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def engine_of_optimizer(self, optimizer: Optimizer) -> Engine | None:
        """None for an optimizer that was not set up."""
        raise NotImplementedError

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole values: of a model that was set up on rank 0's CPU, and empty elsewhere. For a sharded checkpoint, on
        every rank its part. Collective."""
        module = unwrap_module(module)
        engine = engine_of(module)
        if engine is None or engine.module is not module:
            return module.state_dict()
        return engine.checkpoints.model_state(self._sharded)

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Takes this rank's part of whole values. On every rank."""
        module = unwrap_module(module)
        engine = engine_of(module)
        if engine is None:
            module.load_state_dict(state_dict, strict=strict)
            return
        engine.before_step()
        state_dict = materialize_extra_state(state_dict)
        try:
            with engine.checkpoints.loading_weights(self._load_source):
                module.load_state_dict(state_dict, strict=strict)
        finally:
            engine.sharder.sync.invalidate_copies()
            engine.sharder.sync.after_writing()

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole values on rank 0's CPU, in torch's own form, and empty elsewhere. For a sharded checkpoint, on every
        rank its part, with parameters by name. Collective."""
        engine = self.engine_of_optimizer(optimizer)
        if engine is None:
            return super().get_optimizer_state(optimizer)
        return engine.checkpoints.optimizer_state(optimizer, self._sharded)

    @override
    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Writes what ``state`` holds: whole values into one file, or, with ``state_dict_type="sharded"``, a folder.
        Collective.

        Raises:
            CheckpointError: on every rank, when it could not be written; what stood there is still there.
        """
        sharded = self._engine is not None and self._sharded
        check_storage_options(self.checkpoint_io, storage_options, sharded)
        if isinstance(self._checkpoint_io, BackgroundFileIO) and self._engine is not None:
            together = self._engine.checkpoints.together
            with self._show_progress(), together.busy("waits until the file before is written"):
                self._checkpoint_io.wait()
        checkpoint = convert_state(self, state, filter or {})
        if self._engine is None:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        checkpoints = self._engine.checkpoints
        if sharded:
            checkpoints.save(path, *parted(checkpoint), background=self._options.async_save)
            return
        with self._show_progress():
            checkpoints.together.first(
                f"save the checkpoint {path}", lambda: self._write(checkpoints, checkpoint, path, storage_options)
            )

    def _write(self, checkpoints: Checkpoints, checkpoint: Any, path: str | Path, storage_options: Any | None) -> None:
        io = self.checkpoint_io
        with report_user_io(io, f"saving {path}", checkpoints.telling_for):
            io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _show_progress(self) -> AbstractContextManager[None]:
        """Inside, what takes long is told of."""
        return nullcontext() if self._engine is None else report_progress_of(self.checkpoint_io, self._engine.checkpoints.telling)

    @override
    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if self._engine is not None:
            self._engine.checkpoints.saver.finish()
        io = self.checkpoint_io
        telling = self._show_progress()
        self.checkpoint_io = _LazyCheckpointIO(io, None if self._engine is None else self._engine.checkpoints)
        self._load_source = path
        try:
            halfway = nullcontext() if self._engine is None else self._engine.checkpoints.halfway.after_weights(path)
            with telling, halfway:
                left = super().load_checkpoint(path, state, strict, weights_only)
        finally:
            self.checkpoint_io = io
            del self._load_source
        if isinstance(state, dict):
            for key, value in state.items():
                if not hasattr(value, "load_state_dict"):
                    state[key] = _clone_tensors(value)
        return _clone_tensors(left)


def _clone_tensors(value: Any) -> Any:
    """The same outside of a file's mapping, which would go with the file."""
    return apply_to_collection(value, Tensor, torch.clone)
