"""Reads checkpoints of which every rank needs only a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

__all__ = ["load_mapped"]


def load_mapped(io: CheckpointIO, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Maps a local file instead of reading it, which keeps one copy per node, in the page cache; torch's older format,
    which cannot be mapped, and what is kept elsewhere is left to ``io``."""
    local = Path(path)
    if type(io) is TorchCheckpointIO and local.is_file() and is_zipfile(local):
        return torch.load(local, map_location="cpu", mmap=True, weights_only=weights_only)
    return io.load_checkpoint(path, weights_only=weights_only)
