"""Full checkpoints as files: written and read by Lightning's CheckpointIO, unless we know how to do it more safely."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint.archive import check_archive, write_archive
from lightning_zero.checkpoint.together import Together

__all__ = ["BackgroundFileIO", "FileIO", "load_file"]

COPIES = ("state_dict", "optimizer_states")


class FileIO(TorchCheckpointIO):
    """Writes beside, flushes to the disk and renames; holds no second copy in memory meanwhile. What is not on a file
    system goes Lightning's way."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        local = _local(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_archive(checkpoint, local)


class BackgroundFileIO(FileIO):
    """Writes in a thread, one file at a time, and removes old ones there, too, so that none is removed for a new one
    that is not there yet. An error shows at the next call."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._saving: Future[None] | None = None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        self.finish()
        # Whole values are copies already, which nobody else has; the rest may change while it is written.
        taken = {key: value if key in COPIES else _copied(value) for key, value in checkpoint.items()}
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lightning_zero-checkpoint")
        self._saving = self._thread.submit(self._save, taken, path, storage_options)

    def _save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.finish()
        return super().load_checkpoint(*args, **kwargs)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        remove = super().remove_checkpoint
        if self._saving is None:
            remove(path)
        else:
            self._saving.add_done_callback(lambda saved: None if saved.exception() else remove(path))

    def finish(self) -> None:
        """Waits, and raises what went wrong."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    @override
    def teardown(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        self.finish()


def load_file(
    io: CheckpointIO, path: str | Path, weights_only: bool | None, together: Together | None = None
) -> dict[str, Any]:
    """Maps a local file instead of reading it, which keeps one copy per host, in the page cache, after comparing it
    with its checksums; torch's older format, which has none and cannot be mapped, and what is kept elsewhere, or by
    another CheckpointIO, is left to ``io``.

    Args:
        io: the strategy's.
        path: of the file, or its URL.
        weights_only: as in ``torch.load``.
        together: the ranks, which share the work of comparing; None: this one alone. With it, collective.

    Raises:
        CheckpointError: the file is damaged; on every rank.
    """
    local = _local(path) if isinstance(io, FileIO) or type(io) is TorchCheckpointIO else None
    if together is not None:
        rank, count = together.rank, together.world_size
        together.each(f"load the checkpoint {path}", lambda: _check(local, rank, count))
    else:
        _check(local, 0, 1)
    if local is not None and local.is_file() and is_zipfile(local):
        return torch.load(local, map_location="cpu", mmap=True, weights_only=weights_only)
    return io.load_checkpoint(path, weights_only=weights_only)


def _copied(value: Any) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().clone())


def _check(path: Path | None, part: int, parts: int) -> None:
    if path is not None and path.is_file():
        check_archive(path, part, parts)


def _local(path: str | Path) -> Path | None:
    """None for what is not on a file system that this host mounts."""
    fs, place = url_to_fs(str(path))
    return Path(place) if isinstance(fs, LocalFileSystem) else None
