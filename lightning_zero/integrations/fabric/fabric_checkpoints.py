"""Save and load checkpoints with Fabric: files with full values, or folders with shards."""

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

from lightning_zero.checkpoint.manager import CheckpointManager
from lightning_zero.checkpoint.sharded.checkpoint_tensors import materialize_extra_state
from lightning_zero.checkpoint.sharded.reader import checkpoint_kind
from lightning_zero.compat.lightning_private import convert_state
from lightning_zero.engine import Engine, engine_of
from lightning_zero.integrations.checkpoint_files import (
    BackgroundFileIO,
    FileIO,
    check_storage_options,
    load_file,
    read_folder,
    read_on_all_ranks,
    report_progress_of,
    split_state,
)
from lightning_zero.integrations.fabric.loop import unwrap_module
from lightning_zero.integrations.strategy_base import ZeroStrategyBase


class _LazyCheckpointIO(TorchCheckpointIO):
    """Load a checkpoint of either kind whose tensors are read at their use."""

    def __init__(self, io: CheckpointIO, checkpoints: CheckpointManager | None) -> None:
        self._io, self._checkpoints = io, checkpoints

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        own = self._checkpoints
        if own is None:  # no model was set up
            if checkpoint_kind(path) == "folder":
                return read_folder(path, weights_only)
            return load_file(self._io, path, weights_only)
        if own.is_folder(path):
            return read_on_all_ranks(own, path, weights_only)
        return load_file(self._io, path, weights_only, own.ranks)


class FabricCheckpointing(ZeroStrategyBase, ParallelStrategy):
    """Save and load with the engine of the model that was set up last."""

    _load_source: object = "a state dict"  # or the path

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
        raise NotImplementedError

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return full values on rank 0's CPU and nothing elsewhere, or each rank's shards. Collective.

        A model that was not set up has full values on each rank.
        """
        module = unwrap_module(module)
        engine = engine_of(module)
        if engine is None or engine.module is not module:
            return module.state_dict()
        return engine.checkpoints.model_state(self._sharded)

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's shards of full values. Call it on every rank."""
        module = unwrap_module(module)
        engine = engine_of(module)
        if engine is None:
            module.load_state_dict(state_dict, strict=strict)
            return
        state_dict = materialize_extra_state(state_dict)
        with engine.overwriting_weights(), engine.checkpoints.loading_weights(self._load_source):
            module.load_state_dict(state_dict, strict=strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return full values in torch's format on rank 0's CPU and nothing elsewhere. Collective.

        For a sharded checkpoint, return each rank's shards, with parameters by name.
        """
        engine = self.engine_of_optimizer(optimizer)
        if engine is None:
            return super().get_optimizer_state(optimizer)
        return engine.checkpoints.optimizer_state(optimizer, self._sharded)

    @override
    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Write full values to one file, or a folder with ``state_dict_type="sharded"``. Collective.

        Raises:
            CheckpointError: The save failed, on every rank; an earlier checkpoint at ``path`` is still there.
        """
        sharded = self._engine is not None and self._sharded
        check_storage_options(self.checkpoint_io, storage_options, sharded)
        if isinstance(self._checkpoint_io, BackgroundFileIO) and self._engine is not None:
            together = self._engine.checkpoints.ranks
            with self._show_progress(), together.busy("waits until the file before is written"):
                self._checkpoint_io.wait()
        checkpoint = convert_state(self, state, filter or {})
        if self._engine is None:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        checkpoints = self._engine.checkpoints
        if sharded:
            checkpoints.save(path, *split_state(checkpoint), background=self._options.async_save)
            return
        with self._show_progress():
            io = self.checkpoint_io
            checkpoints.ranks.run_on_rank0(
                f"save the checkpoint {path}",
                lambda: io.save_checkpoint(checkpoint, path, storage_options=storage_options),
            )

    def _show_progress(self) -> AbstractContextManager[None]:
        if self._engine is None:
            return nullcontext()
        return report_progress_of(self.checkpoint_io, self._engine.checkpoints.progress)

    @override
    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoints = None if self._engine is None else self._engine.checkpoints
        if checkpoints is not None:
            checkpoints.saver.finish()
        io = self.checkpoint_io
        progress = self._show_progress()
        self.checkpoint_io = _LazyCheckpointIO(io, checkpoints)
        self._load_source = path
        try:
            with progress:
                rest = super().load_checkpoint(path, state, strict, weights_only)
        finally:
            self.checkpoint_io = io
            del self._load_source
        if isinstance(state, dict):
            for key, value in state.items():
                if not hasattr(value, "load_state_dict"):
                    state[key] = _clone_tensors(value)
        return _clone_tensors(rest)


def _clone_tensors(value: Any) -> Any:
    """Copy tensors out of a file's mapping, which ends with the file."""
    return apply_to_collection(value, Tensor, torch.clone)
