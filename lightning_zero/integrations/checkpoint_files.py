"""Checkpoints of strategies: files through Lightning's CheckpointIO, and sharded folders.

:class:`FileIO` and :class:`BackgroundFileIO` write full checkpoints durably and atomically. A strategy's checkpoint is
one dict in memory; :func:`split_state` splits it into the tensors and the rest of a folder. Folders name an optimizer's
state ``optimizer_0``, as Lightning's sharded strategies do; in memory it is in a list, as in full checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from zipfile import is_zipfile

import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint.atomic import readable_path
from lightning_zero.checkpoint.full_checkpoint import write_full
from lightning_zero.checkpoint.integrity import verify_archive, verify_storages
from lightning_zero.checkpoint.manager import CheckpointManager
from lightning_zero.checkpoint.optimizer_state import has_parameter_names
from lightning_zero.checkpoint.progress_reporter import ProgressReporter
from lightning_zero.checkpoint.rank_tasks import RankTasks, SingleProcess
from lightning_zero.checkpoint.remote_files import (
    HTTP,
    download_http,
    exists,
    fetch_full,
    replaced_error,
    resolve_url,
)
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointShard
from lightning_zero.checkpoint.sharded.folder import full_path, remove_checkpoint_at
from lightning_zero.checkpoint.sharded.planner import bytes_to_write
from lightning_zero.checkpoint.sharded.reader import open_checkpoint
from lightning_zero.compat.lightning_private import WrappingCheckpointIO
from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.host_memory import copy_small_values

GATHERED = ("state_dict", "optimizer_states")  # keys of copies that only the checkpoint has
MODEL = ("state_dict", "model")  # the second is FSDPStrategy's
STATES = "optimizer_states"
POLL_S = 0.5  # of a save in the thread

T = TypeVar("T")
OnBytes = Callable[[int], None]


class FileIO(TorchCheckpointIO):
    """Replace files atomically after flushing them to the disk, without a second copy in memory.

    Attributes:
        progress: returns the reporter of a task, a verb and its total bytes; None: report nothing.
    """

    progress: Callable[[str, str, int], ProgressReporter] | None = None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        check_storage_options(self, storage_options)
        with _progress(self, f"Saving {path}", "written", bytes_to_write(checkpoint, rank=0)) as on_write:
            write_full(checkpoint, path, on_write)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        remove_checkpoint_at(path)


class BackgroundFileIO(FileIO):
    """Write files in a thread, one at a time; the next call raises its error.

    Old files are removed in the thread, too, so that none is removed before its successor is complete.
    """

    path: str | None = None
    _bytes = _written = _moves = 0  # of the last save

    def __init__(self) -> None:
        self._inner = FileIO()
        self._inner.progress = lambda *task: nullcontext(self._add_progress)  # type: ignore[assignment, return-value]
        self._thread: ThreadPoolExecutor | None = None
        self._saving: Future[None] | None = None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The CheckpointIO that writes and removes files, as ``AsyncCheckpointIO.checkpoint_io`` is."""
        return self._inner

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        check_storage_options(self, storage_options)
        self.finish()
        path = self.path = full_path(path)  # the process may change its directory
        # Gathered values are copies already; other values may change while the file is written.
        copied = {key: value if key in GATHERED else _copy(value) for key, value in checkpoint.items()}
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lightning_zero-checkpoint")
        self._bytes, self._written = bytes_to_write(copied, rank=0), 0
        self._saving = self._thread.submit(self._save, copied, path)

    def _save(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        self._inner.save_checkpoint(checkpoint, path)

    def _add_progress(self, count: int) -> None:
        self._written += count
        self._moves += 1

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.finish()
        return super().load_checkpoint(*args, **kwargs)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        remove = self._inner.remove_checkpoint
        path = full_path(path)
        if self._saving is None:
            remove(path)
        else:
            self._saving.add_done_callback(lambda saved: None if saved.exception() else remove(path))

    @property
    def busy(self) -> bool:
        """True during a save."""
        return self._saving is not None and not self._saving.done()

    def wait(self) -> None:
        """Wait for the current save; the next call raises its error.

        Call before gathering another checkpoint: the host would hold two.
        """
        if self._saving is None or self._saving.done():
            return
        with _progress(self, f"Saving {self.path}", "written", self._bytes) as on_write:
            reported = moves = 0
            while wait([self._saving], POLL_S).not_done:
                if self._moves != moves:
                    moves, now = self._moves, self._written
                    on_write(now - reported)
                    reported = now

    def finish(self) -> None:
        """Wait for the current save, and raise its error."""
        self.wait()
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    @override
    def teardown(self) -> None:
        self.wait()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        self.finish()


def _copy(value: Any) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().clone())


def check_storage_options(io: CheckpointIO, storage_options: Any | None, sharded: bool = False) -> None:
    """Raise Lightning's error if ``io`` takes no ``storage_options``. Call it on every rank.

    Args:
        io: the strategy's. A user's own one passes.
        sharded: the checkpoint is sharded, and no CheckpointIO writes it.
    """
    if storage_options is None:
        return
    if sharded:
        raise MisconfigurationException(
            "storage_options are for a CheckpointIO, which sharded checkpoints do not use. Leave them out, "
            "or save with state_dict_type='full'."
        )
    if type(io) in (FileIO, BackgroundFileIO, TorchCheckpointIO):
        TorchCheckpointIO.save_checkpoint(cast("TorchCheckpointIO", io), {}, "", storage_options=storage_options)


@contextmanager
def report_progress_of(
    io: CheckpointIO, progress: Callable[[str, str, int], ProgressReporter] | None
) -> Iterator[None]:
    """Make ``io`` report by ``progress`` within the context, if it is ours, or a user's wrapper of ours."""
    inner: CheckpointIO | None = io
    while isinstance(inner, WrappingCheckpointIO) and not isinstance(inner, AsyncCheckpointIO):  # that has a thread
        inner = inner.checkpoint_io
    ours = inner if isinstance(inner, FileIO) else None
    if ours is not None:
        ours.progress = progress
    try:
        yield
    finally:
        if ours is not None:
            ours.progress = None


def _progress(io: CheckpointIO, task: str, verb: str, total: int) -> AbstractContextManager[OnBytes]:
    if not isinstance(io, FileIO) or io.progress is None:
        return nullcontext(lambda count: None)
    return io.progress(task, verb, total)


# -- loading full checkpoints


def load_file(
    io: CheckpointIO, path: str | Path, weights_only: bool | None, ranks: RankTasks | None = None
) -> dict[str, Any]:
    """Compare a full checkpoint with its checksums, and map it: the page cache has one copy for each host.

    One rank of each host downloads a URL. torch's older format, which has no checksums and cannot be mapped, and files
    of a user's CheckpointIO are loaded by ``io``.

    Args:
        io: the strategy's.
        path: of the file, or its URL.
        weights_only: as in ``torch.load``. By default ``False`` for ``http`` and ``https``, as in Lightning: such a
            file is unpickled and may run code, so pass ``True`` for a server that is not trusted. Elsewhere torch's
            default.
        ranks: share the work of comparing; None: this process alone. With ranks, collective.
    """
    everyone = ranks or SingleProcess()
    what = f"load the checkpoint {path}"
    if isinstance(io, BackgroundFileIO) and ranks is not None:
        ranks.run_on_all(what, io.finish)  # it may be this one
    if not (isinstance(io, FileIO) or type(io) is TorchCheckpointIO):
        return io.load_checkpoint(path, weights_only=weights_only)
    if str(path).startswith(HTTP):
        local: Path | None = download_http(str(path), everyone)
        weights_only = False if weights_only is None else weights_only
    else:
        local = _readable_local(path)
    if local is not None:
        return _load_local(io, path, local, str(local), weights_only, ranks)
    if not everyone.run_on_rank0(what, lambda: exists(str(path))):
        return io.load_checkpoint(path, weights_only=weights_only)  # raises
    with fetch_full(str(path), everyone, partial(_progress, io, f"Downloading {path}", "read")) as local:
        return _load_local(io, path, local, str(path), weights_only, ranks)


def _load_local(
    io: CheckpointIO, path: str | Path, local: Path, name: str, weights_only: bool | None, ranks: RankTasks | None
) -> dict[str, Any]:
    if not local.exists():
        return io.load_checkpoint(path, weights_only=weights_only)  # raises
    what = f"load the checkpoint {path}"
    found: list[dict[str, Any]] = []
    before: list[Any] = []

    def compare(part: int, parts: int) -> None:
        before.append(_file_identity(local))
        total = local.stat().st_size // parts
        with _progress(io, f"Comparing {path} with its checksums", "read", total) as on_read:
            verify_archive(local, part, parts, on_read, name)

    def load() -> None:
        if is_zipfile(local):
            found.append(torch.load(local, map_location="cpu", mmap=True, weights_only=weights_only))
            verify_storages(found, local, name)
            tensors: list[Tensor] = []
            apply_to_collection(found, Tensor, tensors.append)
            copy_small_values(tensors)
        else:
            found.append(io.load_checkpoint(local, weights_only=weights_only))

    def read() -> None:
        read_named(path, load)
        # Another job may have replaced the file after it was compared, or only some ranks may have the new one.
        if _file_identity(local) != before[0]:
            raise replaced_error(path)

    if ranks is None:
        compare(0, 1)
        read()
    else:
        host = ranks.host_ranks
        ranks.run_on_all(what, lambda: compare(host.index(ranks.rank), len(host)))
        ranks.run_on_all(what, read)
    return found[0]


def read_verified(path: Any, read: Callable[[Any], T]) -> T:
    """Compare the file at a path or URL with its checksums, and return the result of ``read`` for it.

    Raises:
        CheckpointError: it is damaged, was replaced in the meantime, or cannot be read.
    """
    if not isinstance(path, str | Path) or str(path).startswith(HTTP):
        return read_named(path, lambda: read(path))
    local = _readable_local(path)
    if local is not None:
        if local.is_file():
            verify_archive(local)
        return read_named(path, lambda: read(path))
    url = str(path)
    if not read_named(url, lambda: exists(url)):
        return read_named(url, lambda: read(url))  # raises
    with fetch_full(url, SingleProcess(), lambda total: nullcontext(lambda count: None)) as copy:
        verify_archive(copy, name=url)
        return read_named(url, lambda: read(copy))


def read_named(path: Any, read: Callable[[], T]) -> T:
    """Return the result of ``read``, and name ``path`` in its errors."""
    try:
        return read()
    except (CheckpointError, FileNotFoundError):
        raise
    except Exception as error:  # damage may show as anything, and so may code that weights_only refuses
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _file_identity(path: Path) -> tuple[int, ...] | None:
    if not path.exists():
        return None
    seen = path.stat()
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns


def _readable_local(path: str | Path) -> Path | None:
    """Return the path on a file system that this host mounts, or None."""
    fs, place = resolve_url(path)
    return readable_path(Path(place)) if isinstance(fs, LocalFileSystem) else None


# -- sharded checkpoints


def split_state(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a checkpoint into the state that is saved by tensors, and the rest, saved as one object."""
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


def _holds_shards(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_shards(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_shards(inner) for inner in value)
    return isinstance(value, CheckpointShard)


def read_on_all_ranks(checkpoints: CheckpointManager, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Open a sharded checkpoint, and return it as one dict with lazily read tensors. Collective.

    Raises:
        CheckpointError: on every rank, if one cannot read it.
    """
    folder, found = checkpoints.open(path), []
    checkpoints.ranks.run_on_all(f"read the checkpoint {path}", lambda: found.append(folder.content(weights_only)))
    return found[0]


def read_folder(path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Open a sharded checkpoint in one process, compare it with its checksums, and return it as one dict."""
    folder = open_checkpoint(str(path))
    folder.check(folder.sizes())
    return folder.content(weights_only)


def to_trainer_keys(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Rename keys of a folder, or of a file that Lightning's tool has made of one, to a Trainer's."""
    if MODEL[0] not in checkpoint and MODEL[1] in checkpoint:
        checkpoint[MODEL[0]] = checkpoint.pop(MODEL[1])
    if STATES not in checkpoint and "lr_schedulers" in checkpoint:  # else it was saved with weights_only=True
        states: list[Any] = []
        while (state := checkpoint.pop(f"optimizer_{len(states)}", None)) is not None:
            states.append(state)
        checkpoint[STATES] = states
    return checkpoint
