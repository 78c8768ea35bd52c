"""Full checkpoints as files: written and read by Lightning's CheckpointIO, unless we know how to do it more safely."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

from lightning_zero.checkpoint.archive import verify_archive, write_checkpoint_file
from lightning_zero.checkpoint.downloaded import downloaded
from lightning_zero.checkpoint.elsewhere import write_remote_file
from lightning_zero.checkpoint.locating import located
from lightning_zero.checkpoint.places import standing
from lightning_zero.checkpoint.remote import RemoteFile
from lightning_zero.checkpoint.remote_ranges import exists
from lightning_zero.checkpoint.sharded.contents import bytes_to_write
from lightning_zero.checkpoint.sharded.folder import full_path, remove_checkpoint_at
from lightning_zero.checkpoint.sharded.opened import DOWNLOADED
from lightning_zero.checkpoint.sharded.values import CheckpointTensor
from lightning_zero.checkpoint.storages import verify_storages
from lightning_zero.checkpoint.telling import Telling
from lightning_zero.checkpoint.together import Alone, Together
from lightning_zero.compat.lightning_private import WrappingCheckpointIO
from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.mapped import copy_small_values

__all__ = ["BackgroundFileIO", "FileIO", "check_storage_options", "load_file", "named", "naming", "report_progress_of", "report_user_io"]

COPIES = ("state_dict", "optimizer_states")
CUT = (*COPIES, "current_model_state")  # of a Trainer's: ranks take parts; the last is of Lightning's averages
LOOK_S = 0.5  # between two looks at a save that goes on in a thread
REPLACED = "{} was replaced by another one while it was being loaded. Load it again."

T = TypeVar("T")


class FileIO(TorchCheckpointIO):
    """Writes beside, flushes to the disk and renames, or does at a URL what comes closest; holds no second copy in
    memory meanwhile.

    Attributes:
        telling: gives what tells of so many bytes, of what is done, and how that is called; None: nobody hears.
    """

    telling: Callable[[str, str, int], Telling] | None = None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        check_storage_options(self, storage_options)
        with _told(self, f"Saving {path}", "written", bytes_to_write(checkpoint, rank=0)) as wrote:
            _write(checkpoint, path, wrote)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        remove_checkpoint_at(path)


class BackgroundFileIO(FileIO):
    """Writes in a thread, one file at a time, and removes old ones there, too, so that none is removed for a new one
    that is not there yet. An error shows at the next call.

    Attributes:
        path: where the last one is, or will be.
    """

    path: str | None = None
    _bytes = _written = _moves = 0  # of it

    def __init__(self) -> None:
        self._inner = FileIO()
        self._inner.telling = lambda *about: nullcontext(self._wrote)  # type: ignore[assignment, return-value]
        self._thread: ThreadPoolExecutor | None = None
        self._saving: Future[None] | None = None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Return the CheckpointIO that writes and removes files, as ``AsyncCheckpointIO.checkpoint_io`` does."""
        return self._inner

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        check_storage_options(self, storage_options)
        self.finish()
        path = self.path = full_path(path)  # this process may go elsewhere before it is written
        # Whole values are copies already, which nobody else has; the rest may change while it is written.
        taken = {key: value if key in COPIES else _copied(value) for key, value in checkpoint.items()}
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lightning_zero-checkpoint")
        self._bytes, self._written = bytes_to_write(taken, rank=0), 0
        self._saving = self._thread.submit(self._save, taken, path)

    def _save(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        self._inner.save_checkpoint(checkpoint, path)

    def _wrote(self, count: int) -> None:
        if count:  # in one thread; that it goes on, another one says, too
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
        """Whether a save goes on."""
        return self._saving is not None and not self._saving.done()

    def wait(self) -> None:
        """Until nothing is written any more; what went wrong shows at the next call. Whoever gathers the next copy
        comes here first, or the host would hold two."""
        if self._saving is None or self._saving.done():
            return
        with _told(self, f"Saving {self.path}", "written", self._bytes) as wrote:
            told = moves = 0
            while wait([self._saving], LOOK_S).not_done:
                if self._moves != moves:
                    moves, now = self._moves, self._written
                    wrote(now - told)
                    told = now

    def finish(self) -> None:
        """Waits, and raises what went wrong."""
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


def check_storage_options(io: CheckpointIO, storage_options: Any | None, sharded: bool = False) -> None:
    """Raise Lightning's error if ``io`` takes no ``storage_options``. Call it on every rank, before a collective.

    Args:
        io: the strategy's. One of a user, which may take them, passes.
        storage_options: as in ``Trainer.save_checkpoint``.
        sharded: the checkpoint is sharded, and no CheckpointIO writes it.

    Raises:
        TypeError: ``io`` is ours or Lightning's default.
        MisconfigurationException: the checkpoint is sharded.
    """
    if storage_options is None:
        return
    if sharded:
        raise MisconfigurationException(
            "storage_options are for a CheckpointIO, which sharded checkpoints do not go through. Leave them out, "
            "or save with state_dict_type='full'."
        )
    if type(io) in (FileIO, BackgroundFileIO, TorchCheckpointIO):
        TorchCheckpointIO.save_checkpoint(cast("TorchCheckpointIO", io), {}, "", storage_options=storage_options)


def load_file(
    io: CheckpointIO, path: str | Path, weights_only: bool | None, together: Together | None = None
) -> dict[str, Any]:
    """Maps a local file instead of reading it, which keeps one copy per host, in the page cache, after comparing it
    with its checksums. What is kept elsewhere is compared, too, and each rank reads its part of it, see
    :class:`RemoteFile`; what is downloaded is so once per host, and is then a local file. torch's older format, which
    has no checksums and cannot be mapped, and what is kept by another CheckpointIO, is left to ``io``.

    Args:
        io: the strategy's.
        path: of the file, or its URL.
        weights_only: as in ``torch.load``. By default ``False`` for ``http`` and ``https``, as Lightning takes it: such
            a file is unpickled and may run code, so pass ``True`` for a server that is not trusted. Elsewhere torch
            decides: by default it runs nothing.
        together: the ranks, which share the work of comparing; None: this one alone. With it, collective.

    Raises:
        CheckpointError: the file is damaged; on every rank.
    """
    ranks = together or Alone()
    what = f"load the checkpoint {path}"
    if isinstance(io, BackgroundFileIO) and together is not None:
        together.each(what, io.finish)  # it may be this one
    if not (isinstance(io, FileIO) or type(io) is TorchCheckpointIO):
        return io.load_checkpoint(path, weights_only=weights_only)
    if str(path).startswith(DOWNLOADED):
        local: Path | None = downloaded(str(path), ranks)
        weights_only = False if weights_only is None else weights_only  # as Lightning takes it
    else:
        local = _standing(path)
    if local is None:
        return _load_elsewhere(io, str(path), weights_only, ranks)
    if not local.exists():  # which says that nothing is there
        return io.load_checkpoint(path, weights_only=weights_only)
    place = local

    def read() -> None:
        if is_zipfile(place):
            found.append(torch.load(place, map_location="cpu", mmap=True, weights_only=weights_only))
            verify_storages(found, place, str(place))
            taken: list[Tensor] = []
            apply_to_collection(found, Tensor, taken.append)
            copy_small_values(taken)
        else:
            found.append(io.load_checkpoint(place, weights_only=weights_only))

    def compare(part: int, parts: int) -> None:
        seen.append(_look(place))
        with _compared(io, path, place.stat().st_size // parts) as told:
            _check(place, part, parts, told)

    def read_that() -> None:
        named(path, read)
        # Another job may have put a new one there, which nobody has compared, or which not all ranks have got.
        if _look(place) != seen[0]:
            raise CheckpointError(REPLACED.format(path))

    found: list[dict[str, Any]] = []
    seen: list[Any] = []
    if together is None:
        compare(0, 1)
        read_that()
    else:
        together.each(what, lambda: compare(*together.share))
        together.each(what, read_that)
    return found[0]


def _load_elsewhere(io: CheckpointIO, url: str, weights_only: bool | None, ranks: Together) -> dict[str, Any]:
    what = f"load the checkpoint {url}"
    found: list[Any] = []
    if not ranks.first(what, lambda: exists(url)):
        return io.load_checkpoint(url, weights_only=weights_only)  # which says so

    def opened() -> dict[str, str]:
        found.append(RemoteFile(url))
        return found[0].ranges.identity

    seen = ranks.each(what, opened)
    if any(one != seen[0] for one in seen):
        raise CheckpointError(REPLACED.format(url))
    [file] = found

    def compare() -> None:
        with _compared(io, url, file.ranges.size // ranks.world_size) as told:
            file.check(ranks.rank, ranks.world_size, told)

    def read() -> None:
        content = named(url, lambda: file.content(weights_only))
        if content is None:
            content = named(url, lambda: io.load_checkpoint(url, weights_only=weights_only))
            verify_storages(content, file.ranges.opened(), url)
        # A Trainer's: what callbacks keep of it outlives the loading.
        if isinstance(content, dict) and "pytorch-lightning_version" in content:
            rest = {key: value for key, value in content.items() if key not in CUT}
            content |= apply_to_collection(rest, CheckpointTensor, CheckpointTensor.whole)
        found.append(content)

    ranks.each(what, compare)
    ranks.each(what, read)
    return found[1]


def report_user_io(
    io: CheckpointIO, what: str, telling_for: Callable[[str], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Surrounds what ``io`` does, ``what`` in words: ``telling_for`` tells of it, unless it is ours, and tells."""
    if type(io) in (FileIO, BackgroundFileIO):
        return nullcontext()
    names, inside = [type(io).__name__], io
    while isinstance(inside, WrappingCheckpointIO) and inside.checkpoint_io is not None:
        inside = inside.checkpoint_io
        names.append(type(inside).__name__)
    return telling_for(f"{what} by {' around '.join(names)}")


@contextmanager
def report_progress_of(io: CheckpointIO, telling: Callable[[str, str, int], Telling] | None) -> Iterator[None]:
    """Inside, ``io`` says how far it is by ``telling``, where it is ours, or a user's around ours."""
    inside: CheckpointIO | None = io
    while isinstance(inside, WrappingCheckpointIO) and not isinstance(inside, AsyncCheckpointIO):  # it has a thread
        inside = inside.checkpoint_io
    ours = inside if isinstance(inside, FileIO) else None
    if ours is not None:
        ours.telling = telling
    try:
        yield
    finally:
        if ours is not None:
            ours.telling = None


def _told(io: CheckpointIO, what: str, done: str, count: int) -> AbstractContextManager[Callable[[int], None]]:
    if not isinstance(io, FileIO) or io.telling is None:
        return nullcontext(lambda count: None)
    return io.telling(what, done, count)


def _compared(io: CheckpointIO, path: object, count: int) -> AbstractContextManager[Callable[[int], None]]:
    return _told(io, f"Comparing {path} with its checksums", "read", count)


def _write(checkpoint: dict[str, Any], path: str | Path, wrote: Callable[[int], None]) -> None:
    local = _local(path)
    if local is None:
        write_remote_file(checkpoint, str(path), wrote=wrote)
    else:
        write_checkpoint_file(checkpoint, local, wrote=wrote)


def naming(path: Any, read: Callable[[], T]) -> T:
    """What ``read`` makes of the file at ``path``, or at a URL, after comparing it with its checksums, where it has
    some. What lies at a URL is read twice for that.

    Raises:
        CheckpointError: it is damaged, was replaced meanwhile, or cannot be read.
        FileNotFoundError: it is not there.
    """
    if not isinstance(path, str | Path) or str(path).startswith(DOWNLOADED):
        return named(path, read)
    local = _standing(path)
    if local is not None:
        _check(local, 0, 1)
        return named(path, read)
    url = str(path)
    if not named(url, lambda: exists(url)):
        return named(url, read)  # which says so
    file = named(url, lambda: RemoteFile(url))
    named(url, lambda: file.check(0, 1))
    found = named(url, read)
    if named(url, lambda: RemoteFile(url)).ranges.identity != file.ranges.identity:
        raise CheckpointError(REPLACED.format(url))
    return found


def named(path: Any, read: Callable[[], T]) -> T:
    """What ``read`` makes of the file at ``path``, whose errors tell its name: torch's do not."""
    try:
        return read()
    except (CheckpointError, FileNotFoundError):
        raise
    except Exception as error:  # damage may show as anything, and so may code that somebody wants to be run
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _copied(value: Any) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().clone())


def _look(path: Path | None) -> tuple[int, ...] | None:
    """By which a file is known again."""
    if path is None or not path.exists():
        return None
    seen = path.stat()
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns


def _check(path: Path | None, part: int, parts: int, read: Callable[[int], None] = lambda count: None) -> None:
    if path is not None and path.is_file():
        verify_archive(path, part, parts, read)


def _standing(path: str | Path) -> Path | None:
    local = _local(path)
    return None if local is None else standing(local)


def _local(path: str | Path) -> Path | None:
    """None for what is not on a file system that this host mounts."""
    fs, place = located(path)
    return Path(place) if isinstance(fs, LocalFileSystem) else None
