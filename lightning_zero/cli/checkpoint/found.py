"""Either kind of checkpoint, as the commands see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from lightning_zero.checkpoint.archive import verify_archive
from lightning_zero.checkpoint.opening import open_checkpoint
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.checkpoint.sharded.opened import checkpoint_kind
from lightning_zero.checkpoint.storages import verify_storages
from lightning_zero.errors import CheckpointError

__all__ = ["Found", "checkpoints_in"]

UNTRUSTED = "Unsupported global"  # in torch's error


class Found:
    """A checkpoint at a path.

    Args:
        path: of a file, or a folder, here or where fsspec reaches.

    Raises:
        CheckpointError: there is none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        kind = checkpoint_kind(path)
        if kind == "nothing":
            raise CheckpointError(f"There is nothing at {path}.")
        self.folder = open_checkpoint(path) if kind == "folder" else None
        if self.folder is None and not Path(path).is_file():
            raise CheckpointError(f"{path} is not on a file system of this host. Download it first.")

    def load(self, weights_only: bool = True) -> dict[str, Any]:
        """All of it, as one dict; tensors are read when they are wanted."""
        if self.folder is not None:
            return self.folder.content(weights_only)
        try:
            # Files of torch's older format cannot be mapped.
            mmap = is_zipfile(self.path)
            found = torch.load(self.path, map_location="cpu", mmap=mmap, weights_only=weights_only)
            verify_storages(found, self.path, self.path)
        except CheckpointError:
            raise
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
            verify_archive(Path(self.path), read=read)
            compared = "the checksum of each of its parts"
        else:
            self.folder.check(self.folder.sizes(), read)
            compared = "sizes and checksums of its files"
        content = self._content()
        if self.folder is not None and not self.folder.has_checksums:
            for value in _tensors(content):
                value.clone()
            compared = "the checksums that torch wrote into each piece; all its tensors can be read"
        return compared if content is not None else f"{compared}; objects of classes that are not trusted were not read"

    def _content(self) -> dict[str, Any] | None:
        """Return all of it, and raise if it contradicts itself. None if it holds objects of classes that are not
        trusted."""
        try:
            return self.load()
        except CheckpointError as error:
            if UNTRUSTED not in str(error):
                raise
            return None


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
