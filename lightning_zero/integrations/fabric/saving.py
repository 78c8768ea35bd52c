"""The part of Fabric's strategy that fills checkpoints and reads them: plain files with whole values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine import Engine, engine_of
from lightning_zero.integrations.fabric.module import unwrapped
from lightning_zero.integrations.reading import load_mapped

__all__ = ["Saving"]


class _Mapping(TorchCheckpointIO):
    """Reads by :func:`load_mapped`."""

    def __init__(self, io: CheckpointIO) -> None:
        self._io = io

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return load_mapped(self._io, path, weights_only)


class Saving(ParallelStrategy):
    """For a strategy, which knows the engine of an optimizer."""

    def engine_of_optimizer(self, optimizer: Optimizer) -> Engine | None:
        """None for an optimizer that was not set up."""
        raise NotImplementedError

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole values: of a model that was set up on rank 0's CPU, and empty elsewhere. Collective."""
        module = unwrapped(module)
        engine = engine_of(module)
        return module.state_dict() if engine is None or engine.module is not module else engine.model_state()

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Takes this rank's part of whole values. On every rank."""
        module = unwrapped(module)
        engine = engine_of(module)
        if engine is not None:
            engine.before_step()
        module.load_state_dict(state_dict, strict=strict)
        if engine is not None:
            engine.sharder.access.may_have_changed()
            engine.sharder.access.done_writing()

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole values on rank 0's CPU, in torch's own form; empty elsewhere. Collective."""
        engine = self.engine_of_optimizer(optimizer)
        return super().get_optimizer_state(optimizer) if engine is None else engine.optimizer_state(optimizer)

    @override
    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not state:  # what users get is theirs, and read whole
            return super().load_checkpoint(path, state, strict, weights_only)
        io = self.checkpoint_io
        self.checkpoint_io = _Mapping(io)
        try:
            left = super().load_checkpoint(path, state, strict, weights_only)
        finally:
            self.checkpoint_io = io
        if isinstance(state, dict):
            for key, value in state.items():
                if not hasattr(value, "load_state_dict"):
                    state[key] = _own(value)
        return _own(left)


def _own(value: Any) -> Any:
    """The same outside of a file's mapping, which would go with the file."""
    return apply_to_collection(value, Tensor, torch.clone)
