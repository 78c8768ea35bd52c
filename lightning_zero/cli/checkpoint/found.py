"""Either kind of checkpoint, as the commands see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.archive import check_archive
from lightning_zero.checkpoint.opening import open_folder
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.checkpoint.sharded.opened import kind_of
from lightning_zero.errors import CheckpointError

__all__ = ["Found", "checkpoints_in"]


class Found:
    """A checkpoint at a path.

    Args:
        path: of a file, or a folder, here or where fsspec reaches.

    Raises:
        CheckpointError: there is none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        kind = kind_of(path)
        if kind == "nothing":
            raise CheckpointError(f"There is nothing at {path}.")
        self.folder = open_folder(path) if kind == "folder" else None
        if self.folder is None and not Path(path).is_file():
            raise CheckpointError(f"{path} is not on a file system of this host. Download it first.")

    def load(self, weights_only: bool = True) -> dict[str, Any]:
        """All of it, as one dict; tensors are read when they are wanted."""
        if self.folder is not None:
            return self.folder.content(weights_only)
        try:
            found = torch.load(self.path, map_location="cpu", mmap=True, weights_only=weights_only)
        except Exception as error:  # damage may show as anything
            raise CheckpointError(f"{self.path} cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path} holds a {type(found).__name__}, and not a checkpoint.")
        return found

    def sizes(self) -> dict[str, int]:
        """Bytes of its files."""
        if self.folder is not None:
            return self.folder.sizes()
        return {Path(self.path).name: Path(self.path).stat().st_size}

    def check(self, read: Callable[[int], None]) -> str:
        """Compares it with its checksums. Returns what was compared.

        Raises:
            CheckpointError: it is damaged.
        """
        if self.folder is None:
            check_archive(Path(self.path), read=read)
            return "the checksum of each of its parts"
        self.folder.check(self.folder.sizes(), read)
        if not self.folder.has_checksums:
            for value in _tensors(self.folder.content()):
                value.clone()
            return "nothing: it was written without checksums; all its tensors can be read"
        return "sizes and checksums of its files"


def checkpoints_in(path: str) -> list[str]:
    """The checkpoint at ``path``, or those in the folder there."""
    home = Path(path)
    if not home.is_dir() or (home / METADATA).exists():
        return [path]
    found = sorted(str(entry) for entry in home.iterdir() if entry.name.endswith(".ckpt"))
    return found or [path]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Mapping):
        return [tensor for inner in value.values() for tensor in _tensors(inner)]
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in _tensors(inner)]
    return [value] if isinstance(value, Tensor) else []
