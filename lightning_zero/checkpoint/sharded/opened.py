"""A sharded checkpoint that is read: its files, and what they say about themselves. Ours, and others' in the same
format."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from lightning_zero.checkpoint.archive import verify_open_archive
from lightning_zero.checkpoint.damaged import wrap_read_errors
from lightning_zero.checkpoint.held import PinnedDirectory
from lightning_zero.checkpoint.lateness import refresh_listing
from lightning_zero.checkpoint.locating import located
from lightning_zero.checkpoint.ranges import RangeReader, Placed
from lightning_zero.checkpoint.remote_ranges import RemoteRanges
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.folder import readable_location
from lightning_zero.checkpoint.sharded.hashed import checksum_of
from lightning_zero.checkpoint.sharded.manifest import MANIFEST, Manifest
from lightning_zero.checkpoint.sharded.metadata import METADATA, read_metadata
from lightning_zero.checkpoint.sharded.paths import Keys, nested
from lightning_zero.checkpoint.sharded.piece import PieceElsewhere
from lightning_zero.checkpoint.sharded.raw import lies_plainly, start_of
from lightning_zero.checkpoint.sharded.saving import REST, SAVE_ID_PREFIX
from lightning_zero.checkpoint.sharded.values import CheckpointTensor
from lightning_zero.checkpoint.storages import verify_storages
from lightning_zero.checkpoint.window import Window
from lightning_zero.errors import CheckpointError

__all__ = ["DOWNLOADED", "CheckpointReader", "refreshed_kind", "checkpoint_kind"]

DOWNLOADED = ("http://", "https://")


def checkpoint_kind(path: Any) -> str:
    """What is at ``path``, here or where fsspec reaches: a ``"folder"``, a ``"file"``, or ``"nothing"``. A file object
    is a file, and so is what is downloaded, which would be downloaded to see whether it lists anything."""
    if (not isinstance(path, str) and not hasattr(path, "__fspath__")) or str(path).startswith(DOWNLOADED):
        return "file"
    fs, place = readable_location(str(path))
    if not fs.isdir(place):
        return "file" if fs.exists(place) else "nothing"
    # Object stores may have both: a file came last, and who wrote it was killed before the folder was gone.
    return "file" if fs.isfile(place) else "folder"


def refreshed_kind(path: str | Path) -> str:
    """The same, when it may be otherwise than this host remembers."""
    if not str(path).startswith(DOWNLOADED):
        fs, place = located(path)
        fs.invalidate_cache()
        if isinstance(fs, LocalFileSystem):
            refresh_listing(Path(place).parent)
    return checkpoint_kind(path)


class CheckpointReader:
    """A sharded checkpoint in torch's format. Reads no tensor until it is asked for one.

    Args:
        path: of the folder, or its URL.

    Attributes:
        path: as given.
        save_id: another one for each save; None if the manifest is missing.
        has_checksums: True if :meth:`check` compares contents in addition to lengths.
        world_size: number of ranks that wrote it; None if the manifest is missing.
        manifest: None if another program wrote the checkpoint.
        metadata: the content of ``.metadata``.

    Raises:
        CheckpointError: it is no checkpoint, or not a whole one.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._ranges: dict[str, RangeReader | RemoteRanges] = {}  # by file, once it is asked for
        self._fs, self._place = readable_location(path)
        if isinstance(self._fs, LocalFileSystem):
            self._held = PinnedDirectory(self._place)
            self._place = self._held.path
        self._told = b""  # what the manifest says, where there is one
        self.manifest = manifest = self._read_manifest()
        self.has_checksums = manifest is not None
        self.save_id = manifest.save_id if manifest is not None else None
        self.world_size = manifest.world_size if manifest is not None else None
        if not self._has(METADATA):
            raise CheckpointError(
                f"{path} holds no sharded checkpoint: it has no file {METADATA!r}. It may be what a save that was "
                "killed has left, or a folder of something else."
            )
        if self.manifest is not None:
            self.check([METADATA])
        with self.open(METADATA) as file:
            self.metadata = read_metadata(file, self._named(METADATA))
        said = getattr(getattr(self.metadata, "storage_meta", None), "save_id", None) or ""
        if self.manifest is None and said.startswith(SAVE_ID_PREFIX):
            raise CheckpointError(
                f"{path} is not complete: its {MANIFEST!r} is missing, which is written last. The save was killed, or "
                "a copy of the folder was. Use another checkpoint."
            )
        if self.manifest is not None and said != self.manifest.save_id:
            raise CheckpointError(
                f"{self._named(METADATA)} and {self._named(MANIFEST)} were written by different saves. Use another "
                "checkpoint."
            )

    @property
    def place(self) -> Path | None:
        """On a file system of this host, as this process finds it while this is open; None elsewhere."""
        return Path(self._place) if isinstance(self._fs, LocalFileSystem) else None

    # -- files

    def open(self, name: str) -> BinaryIO:
        """A file of the folder, for reading."""
        with self._opening(name):
            file: BinaryIO = self._fs.open(f"{self._place}/{name}", "rb")
        return file

    @contextmanager
    def _opening(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise CheckpointError(f"{self._named(name)} is missing. Use another checkpoint.") from None
        except OSError as error:
            raise self._unreadable(name, error) from error

    def _has(self, name: str) -> bool:
        return bool(self._fs.exists(f"{self._place}/{name}"))

    def _named(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"

    def _unreadable(self, name: str, error: Exception) -> CheckpointError:
        why = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
        return CheckpointError(f"{self._named(name)} cannot be read: {why}.")

    def _read_manifest(self) -> Manifest | None:
        if not self._has(MANIFEST):
            return None
        with self.open(MANIFEST) as file:
            self._told = file.read()
        return Manifest.from_bytes(self._told, self._named(MANIFEST))

    def sizes(self) -> dict[str, int]:
        if self.manifest is not None:
            return {name: found.bytes for name, found in self.manifest.files.items()}
        return {
            name: int(self._fs.size(f"{self._place}/{name}")) if self._has(name) else 0
            for name in sorted(self._named_files())
        }

    def check(self, names: Iterable[str], read: Callable[[int], None] = lambda count: None) -> None:
        if self.manifest is None:
            self._check_pieces(set(names), read)
            return
        for name in names:
            wanted = self.manifest.files.get(name)
            if wanted is None:
                raise CheckpointError(f"{self._named(name)} is not of this checkpoint: its manifest does not name it.")
            if not self._has(name):
                raise CheckpointError(f"{self._named(name)} is missing. Use another checkpoint.")
            size = int(self._fs.size(f"{self._place}/{name}"))
            if size != wanted.bytes:
                raise CheckpointError(
                    f"{self._named(name)} is damaged: it has {size:,} bytes, and had {wanted.bytes:,} when it was "
                    "saved. Use another checkpoint."
                )
            with self.open(name) as file:
                try:
                    found = checksum_of(file, read)
                except OSError as error:
                    raise self._unreadable(name, error) from error
            if found != wanted:
                raise CheckpointError(
                    f"{self._named(name)} is damaged: its checksum is {found.xxh3_128}, and was {wanted.xxh3_128} "
                    "when it was saved. Use another checkpoint."
                )

    def _check_pieces(self, names: set[str], read: Callable[[int], None]) -> None:
        """Compare what somebody else wrote with ``.metadata``, and each piece with the checksums that ``torch.save``
        has put into it."""
        self._check_extents(names)
        if REST in names:
            with wrap_read_errors(self._named(REST)), self.open(REST) as file:
                verify_open_archive(file, self._named(REST), 0, 1, read)
        done: set[tuple[str, int]] = set()
        for key, entry in self.metadata.state_dict_metadata.items():
            chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]
            for chunk in chunks:
                info = self._info(MetadataIndex(key, None if chunk is None else chunk.offsets))
                if info.relative_path not in names or (info.relative_path, info.offset) in done:
                    continue
                done.add((info.relative_path, info.offset))
                with self._opened_piece(info) as part:
                    verify_open_archive(part, self._named(info.relative_path), 0, 1, read)
                if isinstance(entry, TensorStorageMetadata) and chunk is not None:
                    sizes, dtype = torch.Size(chunk.sizes), entry.properties.dtype
                    if self._start(info, sizes, dtype) is None:
                        self._load_tensor(info, key, sizes, dtype)

    def _check_extents(self, names: set[str]) -> None:
        """Raise if files are shorter than ``.metadata`` says."""
        ends: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            if info.relative_path not in names:
                continue
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            if not self._has(name):
                raise CheckpointError(f"{self._named(name)} is missing. Use another checkpoint.")
            size = int(self._fs.size(f"{self._place}/{name}"))
            if size < end:
                raise self._short(name, size, end)

    def _short(self, name: str, size: int, end: int) -> CheckpointError:
        return CheckpointError(
            f"{self._named(name)} is damaged: it has {size:,} bytes, and its {METADATA!r} speaks of {end:,}. Use "
            "another checkpoint."
        )

    # -- what is in them

    def content(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint as one dict. A sharded tensor is a
        :class:`~lightning_zero.checkpoint.sharded.values.CheckpointTensor`.

        Args:
            weights_only: False: trust the files, and unpickle anything in them.

        Raises:
            CheckpointError: it is damaged, or holds nothing that a loop could resume from.
        """
        with wrap_read_errors(self.path):
            return self._content(weights_only)

    def _content(self, weights_only: bool | None) -> dict[str, Any]:
        rest = self.rest(weights_only)
        if not isinstance(rest, dict):
            raise CheckpointError(
                f"{self.path} holds tensors, and no file {REST!r} with the state of a Trainer or a loop: neither has "
                "written it. Make one file of it with "
                "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(), and load that into the module."
            )
        return rest | self.state(weights_only=weights_only)

    @property
    def written_by(self) -> str | None:
        return self.manifest.written_by if self.manifest is not None else None

    def rest(self, weights_only: bool | None = None) -> Any:
        """What was saved as one object; None where nothing was. Unpickles only what is harmless, unless
        ``weights_only=False`` says that the file is to be trusted."""
        if not self._has(REST):
            return None
        with self.open(REST) as file:
            try:
                found = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
                verify_storages(found, file, self._named(REST))
                return found
            except CheckpointError:
                raise
            except Exception as error:  # damage may show as anything, and so may code that somebody wants to be run
                raise CheckpointError(f"{self._named(REST)} cannot be read: {type(error).__name__}: {error}") from error

    def state(self, within: str = "", weights_only: bool | None = None) -> dict[str, Any]:
        """The nested state: :class:`~lightning_zero.checkpoint.sharded.values.CheckpointTensor` for each tensor, and other
        things as they are.

        Args:
            within: only what is under this key, with the key itself.
            weights_only: as in :meth:`content`.
        """
        paths = self.metadata.planner_data or {}
        found: dict[Keys, Any] = {}
        known: dict[Any, CheckpointTensor] = {}  # tied ones lie in the same place, and are one
        for key, entry in self.metadata.state_dict_metadata.items():
            path = tuple(paths.get(key, (key,)))
            if within and path[0] != within:
                continue
            if isinstance(entry, TensorStorageMetadata):
                saved = self._saved(key, entry)
                found[path] = known.setdefault(self._places(key, entry) or path, saved)
            else:
                found[path] = self._load(self._info(MetadataIndex(key)), key, weights_only)
        return nested(found)

    def _saved(self, key: str, entry: TensorStorageMetadata) -> CheckpointTensor:
        chunks = []
        for number, chunk in enumerate(entry.chunks):
            index = MetadataIndex(key, chunk.offsets, number)
            read = partial(self._tensor, self._info(index), key, torch.Size(chunk.sizes), entry.properties.dtype)
            chunks.append((Box(tuple(chunk.offsets), tuple(chunk.sizes)), read))
        return CheckpointTensor(key, torch.Size(entry.size), entry.properties.dtype, chunks)

    def _places(self, key: str, entry: TensorStorageMetadata) -> tuple[Any, ...]:
        infos = [self._info(MetadataIndex(key, chunk.offsets, number)) for number, chunk in enumerate(entry.chunks)]
        return tuple((info.relative_path, info.offset) for info in infos)

    def _info(self, index: MetadataIndex) -> Any:
        info = self.metadata.storage_data.get(index)
        if info is None:
            raise CheckpointError(f"{self._named(METADATA)} does not say in which file {index.fqn!r} lies.")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{self.path} was saved with extensions of torch's format ({info.transform_descriptors}), which are "
                "not known here. Save it again without them."
            )
        return info

    def _tensor(self, info: Any, key: str, sizes: torch.Size, dtype: torch.dtype) -> Tensor | Placed:
        find, load = partial(self._start, info, sizes, dtype), partial(self._load_tensor, info, key, sizes, dtype)
        ranges = self._ranges_of(info.relative_path)
        if isinstance(ranges, RemoteRanges):
            return PieceElsewhere(ranges, info.length, find, load, dtype, sizes)
        start = find()
        return load() if start is None else Placed(ranges, start, dtype, sizes)

    def _load_tensor(self, info: Any, key: str, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        value = self._load(info, key)
        if not isinstance(value, Tensor) or value.shape != sizes or value.dtype != dtype:
            raise CheckpointError(f"{self._named(info.relative_path)} holds something else where {key!r} should be.")
        return value

    def _start(self, info: Any, sizes: torch.Size, dtype: torch.dtype) -> int | None:
        """Where its values lie in a file that we wrote, which has been compared with its checksum; in others' files,
        where the piece says that it is laid out so."""
        count = sizes.numel() * dtype.itemsize
        with self._opened_piece(info) as part:
            try:
                if self.manifest is None and not lies_plainly(part, dtype, sizes):
                    return None
                return start_of(part, info.offset, count) if count else 0
            except (ValueError, zipfile.BadZipFile):
                return None

    def _ranges_of(self, name: str) -> RangeReader | RemoteRanges:
        if name not in self._ranges:
            place = f"{self._place}/{name}"
            local = isinstance(self._fs, LocalFileSystem)
            with self._opening(name):
                self._ranges[name] = RangeReader(place) if local else RemoteRanges(self._named(name), (self._fs, place))
            if not local:
                self._look_again()
        return self._ranges[name]

    def _look_again(self) -> None:
        """Whether a file that is known from now on is of this save: the manifest is removed before another save's files
        come, and stands there anew once they are complete."""
        if self.manifest is None:
            return
        try:
            now = self._fs.cat_file(f"{self._place}/{MANIFEST}")
        except FileNotFoundError:
            now = b""
        except Exception as error:  # stores raise their own
            raise self._unreadable(MANIFEST, error) from error
        if now != self._told:
            self._ranges.clear()
            raise CheckpointError(f"{self.path} was replaced by another one while it was being loaded. Load it again.")

    def _load(self, info: Any, key: str, weights_only: bool | None = None) -> Any:
        name = self._named(info.relative_path)
        with self._whole_piece(info) as part:
            try:
                found = torch.load(part, map_location="cpu", weights_only=weights_only is not False)
                verify_storages(found, part, name)
                return found
            except CheckpointError:
                raise
            except Exception as error:  # damage may show as anything
                why = f"{type(error).__name__}: {error}"
                if isinstance(error, pickle.UnpicklingError) and "Unsupported global" in why:
                    raise CheckpointError(f"{name} holds {key!r}, of a class that is not trusted: {why}") from error
                raise CheckpointError(
                    f"{name} is damaged where {key!r} lies: {why}. Use another checkpoint."
                ) from error

    @contextmanager
    def _opened_piece(self, info: Any) -> Iterator[Any]:
        """To read a few of its bytes here and there."""
        ranges = None if self.place is not None else self._ranges_of(info.relative_path)
        if isinstance(ranges, RemoteRanges):
            yield ranges.opened(info.offset, info.length)
            return
        with self.open(info.relative_path) as file:
            yield _Part(file, info.offset, info.length)

    @contextmanager
    def _whole_piece(self, info: Any) -> Iterator[Any]:
        """To read all of it, in as few requests as can be."""
        ranges = None if self.place is not None else self._ranges_of(info.relative_path)
        if not isinstance(ranges, RemoteRanges):
            with self._opened_piece(info) as part:
                yield part
            return
        if info.offset + info.length > ranges.size:
            raise self._short(info.relative_path, ranges.size, info.offset + info.length)
        data = bytearray(info.length)
        ranges.read(info.offset, memoryview(data))
        yield BytesIO(data)

    def _named_files(self) -> set[str]:
        names = {info.relative_path for info in self.metadata.storage_data.values()} | {METADATA}
        return names | ({REST} if self._has(REST) else set())


class _Part(Window):
    """Some bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__(length)
        self._file, self._offset = file, offset

    def fill(self, at: int, view: memoryview) -> int:
        self._file.seek(self._offset + at)
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]
        return count
