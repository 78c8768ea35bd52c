"""Errors about a sharded module's parameters, raised where nobody knows whose they are, or that they are shards."""

from __future__ import annotations

import re

from torch import nn

from lightning_zero.sharding.module_patching import SHAPES, is_sharded
from lightning_zero.sharding.shard import Sharder

__all__ = ["explain_shard_error"]


def explain_shard_error(error: BaseException, root: nn.Module, sharder: Sharder) -> None:
    """Adds to the error which parameters were replaced since ``root`` was sharded, or what to do instead of assigning
    or freezing a weight that was read, which is a plain tensor."""
    line = ""
    if isinstance(error, ValueError) and "is no shard of a live engine" in str(error):
        names = [
            f"{name}.{key}" if name else key
            for name, module in root.named_modules()
            if is_sharded(module)
            for key, shape in module.__dict__[SHAPES].items()
            if shape is not None and (param := module._parameters.get(key)) is not None and sharder.find(param) is None
        ]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            line = f"replaced since the model was sharded: {', '.join(map(repr, names[:4]))}{more}."
    elif isinstance(error, TypeError) and re.search("cannot assign .*Tensor' as parameter", str(error)):
        line = (
            "what is read from a sharded module, module.weight, is a plain tensor with the whole value. Tie weights "
            "before the model is sharded (in __init__(), configure_model() or setup()); to change a value, write "
            "`module.weight.data = value`."
        )
    elif isinstance(error, RuntimeError) and "only change requires_grad flags of leaf" in str(error):
        line = (
            "in a training step, module.weight of a sharded module is computed from its shards. Set requires_grad of "
            "the parameters, by module.requires_grad_(False) or on what module.parameters() returns."
        )
    if line and line not in str(getattr(error, "__notes__", ())):
        error.add_note(f"lightning_zero: {line}")
