"""Between a strategy's checkpoint, one dict, and a sharded one: a folder with what is sharded and the rest apart.

Lightning's own sharded strategies name an optimizer's state ``optimizer_0``, and so do we in files; in memory it stands
in the list that full checkpoints have.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from torch import Tensor

from lightning_zero.checkpoint.sharded.opened import OpenedFolder
from lightning_zero.checkpoint.sharded.values import ShardedValue
from lightning_zero.errors import CheckpointError

__all__ = ["joined", "parted"]

MODEL = ("state_dict", "model")  # the second is FSDPStrategy's
STATES = "optimizer_states"


def parted(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes into tensors' files, and what is saved as one object: Lightning's own entries, and users'."""
    state: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if key == STATES:
            state.update({f"optimizer_{number}": one for number, one in enumerate(value)})
        elif key == MODEL[0] or _holds_shards(value):
            state[key] = value
        else:
            rest[key] = value
    return state, rest


def joined(folder: OpenedFolder, weights_only: bool | None) -> dict[str, Any]:
    """The checkpoint as one dict. Tensors are read when they are wanted.

    Raises:
        CheckpointError: the folder holds tensors, and nothing that a Trainer could go on from.
    """
    rest, state = folder.rest(weights_only), folder.state()
    if not isinstance(rest, dict):
        raise CheckpointError(
            f"{folder.path} holds tensors, and no file 'meta.pt' in which a Trainer has saved its own state: it was "
            "not written by a Trainer. Make one file of it with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(), and load that into the module."
        )
    if MODEL[0] not in state and MODEL[1] in state:
        state[MODEL[0]] = state.pop(MODEL[1])
    states: list[Any] = []
    for number in count():
        if f"optimizer_{number}" not in state:
            break
        states.append(state.pop(f"optimizer_{number}"))
    return rest | state | {STATES: states}


def _holds_shards(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_shards(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_shards(inner) for inner in value)
    return isinstance(value, Tensor) and isinstance(value, ShardedValue)
