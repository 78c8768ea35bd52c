"""What ``on_load_checkpoint`` has put into a module out of a checkpoint: values that lie in a file until somebody wants
them are no parameters, and a file is no place for buffers."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.sharded.values import CheckpointTensor
from lightning_zero.compat.modules import extra_state_suffix
from lightning_zero.compat.tensors import tree_map_only

__all__ = ["materialize_extra_state", "materialize_values"]


def materialize_values(module: nn.Module) -> None:
    """Gives parameters and buffers that are values of a checkpoint memory of their own; what is tied stays so.

    Raises:
        ValueError: one has lost its memory to ``param.data = value``, where torch looks at the memory alone.
    """
    made: dict[int, Tensor] = {}
    for prefix, child in module.named_modules():
        parameters = dict(child.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(child.named_buffers(recurse=False, remove_duplicate=False))
        for name, value in (parameters | buffers).items():
            if isinstance(value, CheckpointTensor):
                if id(value) not in made:
                    whole = value.whole()
                    made[id(value)] = nn.Parameter(whole, value.requires_grad) if name in parameters else whole
                setattr(child, name, made[id(value)])
            elif _is_lost(value):
                full = f"{prefix}.{name}" if prefix else name
                raise ValueError(
                    f"{full!r} has no memory: its .data was set to a value of the checkpoint, which is only read when "
                    "it is wanted. In on_load_checkpoint() set .data to value.clone(), or leave it to "
                    "load_state_dict()."
                )


def materialize_extra_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with memory of its own for what a module's ``set_extra_state()`` is given and may keep."""
    owned: Any = copy(state)  # with torch's notes of modules' versions
    for key, value in state.items():
        if key.rpartition(".")[2] == extra_state_suffix:
            owned[key] = tree_map_only(CheckpointTensor, CheckpointTensor.whole, value)
    return owned  # type: ignore[no-any-return]


def _is_lost(value: Tensor) -> bool:
    plain = type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu" and value.layout is torch.strided
    return plain and value.numel() > 0 and not value.data_ptr()
