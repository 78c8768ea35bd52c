"""Between a strategy's checkpoint, one dict, and a sharded one: a folder with what is sharded and the rest apart.

Lightning's own sharded strategies name an optimizer's state ``optimizer_0``, and so do we in files; in memory it stands
in the list that full checkpoints have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.checkpoints import Checkpoints
from lightning_zero.checkpoint.opening import open_checkpoint
from lightning_zero.checkpoint.sharded.optimizers import has_parameter_names
from lightning_zero.checkpoint.sharded.values import CheckpointShard

__all__ = ["to_trainer_keys", "parted", "read_on_all_ranks", "read_folder"]

MODEL = ("state_dict", "model")  # the second is FSDPStrategy's
STATES = "optimizer_states"


def parted(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes into tensors' files, and what is saved as one object: all that has no shards in it."""
    state: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if key == STATES:
            state.update({f"optimizer_{number}": one for number, one in enumerate(value)})
        elif key in MODEL or _holds_shards(value) or (isinstance(value, Mapping) and has_parameter_names(value)):
            state[key] = value
        else:
            rest[key] = value
    return state, rest


def read_on_all_ranks(checkpoints: Checkpoints, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """The checkpoint as one dict, opened by all ranks. Tensors are read when they are wanted. Collective.

    Raises:
        CheckpointError: on every rank, when one cannot read it.
    """
    folder, found = checkpoints.open(path), []
    checkpoints.together.each(f"read the checkpoint {path}", lambda: found.append(folder.content(weights_only)))
    return found[0]


def read_folder(path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """The same for one process by itself, after comparing all files with their checksums."""
    folder = open_checkpoint(str(path))
    folder.check(folder.sizes())
    return folder.content(weights_only)


def to_trainer_keys(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """With the names that a Trainer knows. Also of a file that Lightning's tool has made of a folder."""
    if MODEL[0] not in checkpoint and MODEL[1] in checkpoint:
        checkpoint[MODEL[0]] = checkpoint.pop(MODEL[1])
    if STATES not in checkpoint and "lr_schedulers" in checkpoint:  # else it was saved with weights_only=True
        states: list[Any] = []
        while (state := checkpoint.pop(f"optimizer_{len(states)}", None)) is not None:
            states.append(state)
        checkpoint[STATES] = states
    return checkpoint


def _holds_shards(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_shards(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_shards(inner) for inner in value)
    return isinstance(value, CheckpointShard)
