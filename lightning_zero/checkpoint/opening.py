"""Whose a folder is."""

from __future__ import annotations

from lightning_zero.checkpoint.deepspeed.files import is_deepspeeds
from lightning_zero.checkpoint.deepspeed.opened import DeepSpeedFolder
from lightning_zero.checkpoint.opened import Opened
from lightning_zero.checkpoint.sharded.opened import OpenedFolder

__all__ = ["open_folder"]


def open_folder(path: str) -> Opened:
    """The sharded checkpoint at ``path``, or at that URL.

    Raises:
        CheckpointError: it is none, or not a whole one.
    """
    return DeepSpeedFolder(path) if is_deepspeeds(path) else OpenedFolder(path)
