"""What ``on_load_checkpoint`` has put into a module out of a checkpoint: values that lie in a file until somebody wants
them are no parameters, and a file is no place for buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.sharded.values import SavedValue

__all__ = ["own_values"]


def own_values(module: nn.Module) -> None:
    """Gives parameters and buffers that are values of a checkpoint memory of their own; what is tied stays so.

    Raises:
        ValueError: one has lost its memory to ``param.data = value``, where torch looks at the memory alone.
    """
    made: dict[int, Tensor] = {}
    for prefix, child in module.named_modules():
        parameters = dict(child.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(child.named_buffers(recurse=False, remove_duplicate=False))
        for name, value in (parameters | buffers).items():
            if isinstance(value, SavedValue):
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


def _is_lost(value: Tensor) -> bool:
    plain = type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu" and value.layout is torch.strided
    return plain and value.numel() > 0 and not value.data_ptr()
