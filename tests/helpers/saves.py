"""Checkpoints of a small state, each of whose saves has its own values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.full_checkpoint import write_local_file
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.checkpoint.sharded.reader import checkpoint_kind
from lightning_zero.integrations.checkpoint_files import FileIO, load_file, read_folder
from tests.helpers.threaded import on_ranks, sharded_state, values_of

__all__ = ["save", "save_file", "seed_of"]

WORLD = 2


def save(path: Path | str, seed: float, world_size: int = WORLD) -> list[Any]:
    def attempt(together: Any) -> None:
        save_sharded(path, sharded_state(together.rank, world_size, seed), {"seed": seed}, together)

    return on_ranks(world_size, attempt)


def save_file(path: Path, seed: float) -> None:
    write_local_file({"seed": seed, "state_dict": values_of(seed)}, path)


def seed_of(path: Path | str) -> float | None:
    """Return the save that is there, all of whose values are its own; None: there is none."""
    if checkpoint_kind(path) == "nothing":
        return None
    if checkpoint_kind(path) == "folder":
        found = read_folder(path, None)
        state = {key: value.full_tensor() for key, value in found["state_dict"].items()}
    else:
        found = load_file(FileIO(), path, None)
        state = found["state_dict"]
    for key, value in values_of(found["seed"]).items():
        assert torch.equal(state[key], value), key
    return found["seed"]
