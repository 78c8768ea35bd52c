"""Read sharded checkpoints in DCP's format, ours and those of other programs.

:class:`CheckpointReader` verifies files and returns the nested state with lazily read tensors. A folder at a URL is
downloaded to local scratch, file by file, when it is verified or when a tensor is read.

Kept although DCP has FileSystemReader: that one unpickles arbitrary classes of ``.metadata``, has no checksums, and
reads each chunk through ``torch.load``, which copies it twice.
"""

from __future__ import annotations

import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from lightning_zero.checkpoint.atomic import PinnedDirectory, refresh_listing
from lightning_zero.checkpoint.integrity import checksum_of, verify_open_archive, verify_storages, wrap_read_errors
from lightning_zero.checkpoint.remote_files import HTTP, ScratchFolder, replaced_error, resolve_url
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointTensor, RangeReader, StoredTensor
from lightning_zero.checkpoint.sharded.folder import MANIFEST, Manifest, readable_location
from lightning_zero.checkpoint.sharded.metadata import METADATA, OBJECTS_FILE, SAVE_ID_PREFIX, read_metadata
from lightning_zero.checkpoint.sharded.planner import Keys, nest_state
from lightning_zero.errors import CheckpointError

# The header of a zip entry: 26 bytes, then the lengths of its name and of its extra field.
HEADER, LENGTHS = 30, struct.Struct("<26xHH")


def checkpoint_kind(path: Any) -> str:
    """Return ``"folder"``, ``"file"`` or ``"nothing"`` for a path, URL or file object."""
    if (not isinstance(path, str) and not hasattr(path, "__fspath__")) or str(path).startswith(HTTP):
        return "file"
    fs, place = readable_location(str(path))
    if not fs.isdir(place):
        return "file" if fs.exists(place) else "nothing"
    # Object stores may have both: the file is newer, and its writer was killed before it removed the folder.
    return "file" if fs.isfile(place) else "folder"


def refreshed_kind(path: str | Path) -> str:
    """Return :func:`checkpoint_kind` after invalidating caches of this host."""
    if not str(path).startswith(HTTP):
        fs, place = resolve_url(path)
        fs.invalidate_cache()
        if isinstance(fs, LocalFileSystem):
            refresh_listing(Path(place).parent)
    return checkpoint_kind(path)


def open_checkpoint(path: str) -> CheckpointReader:
    """Return the reader of a sharded checkpoint at a path or URL.

    Raises:
        CheckpointError: it is no checkpoint, an incomplete one, or one of DeepSpeed.
    """
    if _is_deepspeed(path):
        new = f"{path.rstrip('/').removesuffix('.ckpt')}-full.ckpt"
        raise CheckpointError(
            f"{path} is a checkpoint of DeepSpeed. Convert it to a full one, once, with the script in this project's "
            f"repository, and load that: python examples/convert_deepspeed_checkpoint.py {path} {new}"
        )
    return CheckpointReader(path)


def _is_deepspeed(path: str) -> bool:
    fs, place = readable_location(path)
    if not fs.isdir(place) or fs.exists(f"{place}/{METADATA}"):
        return False
    homes = [home for home in (place, f"{place}/checkpoint") if fs.isdir(home)]
    names = [str(name) for home in homes for name in fs.ls(home, detail=False)]
    return fs.isfile(f"{place}/latest") or any(name.endswith("_model_states.pt") for name in names)


class CheckpointReader:
    """A sharded checkpoint that is open. Reads no tensor until torch or the caller needs it.

    Attributes:
        save_id: unique for each save; None if the manifest is missing.
        has_checksums: True if :meth:`check` compares contents in addition to lengths.
        world_size: number of ranks that wrote it; None if the manifest is missing.
        manifest: None if another program wrote the checkpoint.
        scratch: for downloads; ranks of a host may share it.

    Raises:
        CheckpointError: it is no checkpoint, or an incomplete one.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.scratch: ScratchFolder | None = None
        self._range_readers: dict[str, RangeReader] = {}  # by file
        self._fs, self._place = readable_location(path)
        self.is_remote = not isinstance(self._fs, LocalFileSystem)
        if not self.is_remote:
            self._pinned = PinnedDirectory(self._place)
            self._place = self._pinned.path
        self._manifest_bytes = b""
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
        save_id = getattr(getattr(self.metadata, "storage_meta", None), "save_id", None) or ""
        if self.manifest is None and save_id.startswith(SAVE_ID_PREFIX):
            raise CheckpointError(
                f"{path} is not complete: its {MANIFEST!r} is missing, which is written last. The save, or a "
                "copy of the folder, was interrupted. Use another checkpoint."
            )
        if self.manifest is not None and save_id != self.manifest.save_id:
            raise CheckpointError(
                f"{self._named(METADATA)} and {self._named(MANIFEST)} were written by different saves. Use another "
                "checkpoint."
            )

    # -- files

    def open(self, name: str) -> BinaryIO:
        """Open a file of the folder for reading."""
        local = self._local_file(name)
        with self._file_errors(name):
            if local is not None:
                return open(local, "rb")
            remote: BinaryIO = self._fs.open(f"{self._place}/{name}", "rb")
            return remote

    def _local_file(self, name: str) -> Path | None:
        if not self.is_remote:
            return Path(f"{self._place}/{name}")
        found = None if self.scratch is None else self.scratch.path / name
        return found if found is not None and found.exists() else None

    def _download(self, name: str, on_read: Callable[[int], None] = lambda count: None) -> Path:
        self.scratch = self.scratch or ScratchFolder()
        with self._file_errors(name):
            try:
                self.scratch.check_space(self._size(name), self.path)
                return self.scratch.download(self._fs, f"{self._place}/{name}", name, on_read)
            except (OSError, CheckpointError):
                raise
            except Exception as error:  # stores raise their own
                raise self._unreadable(name, error) from error

    @contextmanager
    def _file_errors(self, name: str) -> Iterator[None]:
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
            self._manifest_bytes = file.read()
        return Manifest.from_bytes(self._manifest_bytes, self._named(MANIFEST))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file."""
        if self.manifest is not None:
            return {name: found.bytes for name, found in self.manifest.files.items()}
        names = {info.relative_path for info in self.metadata.storage_data.values()} | {METADATA}
        names |= {OBJECTS_FILE} if self._has(OBJECTS_FILE) else set()
        return {name: self._size(name) if self._has(name) else 0 for name in sorted(names)}

    def _size(self, name: str) -> int:
        return int(self._fs.size(f"{self._place}/{name}"))

    def check(self, names: Iterable[str], on_read: Callable[[int], None] = lambda count: None) -> None:
        """Compare files with their checksums; without a manifest, with the CRCs of ``torch.save``."""
        names = list(names)
        try:
            if self.manifest is None:
                self._check_chunks(set(names), on_read)
                return
            for name in names:
                self._check_file(name, self.manifest, on_read)
        except CheckpointError as error:
            self._check_not_replaced(error)
            raise

    def _check_file(self, name: str, manifest: Manifest, on_read: Callable[[int], None]) -> None:
        wanted = manifest.files.get(name)
        if wanted is None:
            raise CheckpointError(f"{self._named(name)} is not of this checkpoint: its manifest does not name it.")
        if not self._has(name):
            raise CheckpointError(f"{self._named(name)} is missing. Use another checkpoint.")
        size = self._size(name)
        if size != wanted.bytes:
            raise CheckpointError(
                f"{self._named(name)} is damaged: it has {size:,} bytes, and had {wanted.bytes:,} when it was saved. "
                "Use another checkpoint."
            )
        if self.is_remote and name != METADATA:
            self._download(name, lambda count: on_read(0))
        with self.open(name) as file:
            try:
                found = checksum_of(file, on_read)
            except OSError as error:
                raise self._unreadable(name, error) from error
        if found != wanted:
            raise CheckpointError(
                f"{self._named(name)} is damaged: its checksum is {found.xxh3_128}, and was {wanted.xxh3_128} when it "
                "was saved. Use another checkpoint."
            )

    def _check_not_replaced(self, error: CheckpointError) -> None:
        """Raise if another save has replaced the manifest at the URL, so that files of two saves were mixed."""
        if not self.is_remote or self.manifest is None:
            return
        try:
            now = self._fs.cat_file(f"{self._place}/{MANIFEST}")
        except FileNotFoundError:
            now = b""
        except Exception:  # the first error has the cause
            return
        if now != self._manifest_bytes:
            raise replaced_error(self.path) from error

    def _check_chunks(self, names: set[str], on_read: Callable[[int], None]) -> None:
        """Compare files of another program with ``.metadata``, and each chunk with its CRCs."""
        self._check_lengths(names)
        for name in names if self.is_remote else ():
            self._download(name, lambda count: on_read(0))
        if OBJECTS_FILE in names:
            with wrap_read_errors(self._named(OBJECTS_FILE)), self.open(OBJECTS_FILE) as file:
                verify_open_archive(file, self._named(OBJECTS_FILE), 0, 1, on_read)
        done: set[tuple[str, int]] = set()
        for key, entry in self.metadata.state_dict_metadata.items():
            chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]
            for chunk in chunks:
                info = self._info(MetadataIndex(key, None if chunk is None else chunk.offsets))
                if info.relative_path not in names or (info.relative_path, info.offset) in done:
                    continue
                done.add((info.relative_path, info.offset))
                with self._open_slice(info) as part:
                    verify_open_archive(part, self._named(info.relative_path), 0, 1, on_read)
                if isinstance(entry, TensorStorageMetadata) and chunk is not None:
                    sizes, dtype = torch.Size(chunk.sizes), entry.properties.dtype
                    if self._start(info, sizes, dtype) is None:
                        self._load_tensor(info, key, sizes, dtype)

    def _check_lengths(self, names: set[str]) -> None:
        """Raise if files are shorter than ``.metadata`` says."""
        ends: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            if info.relative_path not in names:
                continue
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            if not self._has(name):
                raise CheckpointError(f"{self._named(name)} is missing. Use another checkpoint.")
            if (size := self._size(name)) < end:
                raise CheckpointError(
                    f"{self._named(name)} is damaged: it has {size:,} bytes, and its {METADATA!r} speaks of {end:,}. "
                    "Use another checkpoint."
                )

    # -- content

    def content(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint as one dict, with a :class:`CheckpointTensor` for each tensor.

        Args:
            weights_only: False: trust the files, and unpickle anything in them.

        Raises:
            CheckpointError: it is damaged, or no Trainer or Fabric loop has saved it.
        """
        with wrap_read_errors(self.path):
            rest = self.rest(weights_only)
            if not isinstance(rest, dict):
                raise CheckpointError(
                    f"{self.path} holds tensors, and no file {OBJECTS_FILE!r} with the state of a Trainer or a loop: "
                    "neither has written it. Make one file of it with "
                    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(), and load that into the module."
                )
            return rest | self.state(weights_only)

    @property
    def written_by(self) -> str | None:
        return self.manifest.written_by if self.manifest is not None else None

    def rest(self, weights_only: bool | None = None) -> Any:
        """Return the values that were saved as one object, or None; see :meth:`content`."""
        if not self._has(OBJECTS_FILE):
            return None
        with self.open(OBJECTS_FILE) as file:
            try:
                found = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
                verify_storages(found, file, self._named(OBJECTS_FILE))
                return found
            except CheckpointError:
                raise
            except Exception as error:  # damage may show as anything, and so may code that weights_only refuses
                raise CheckpointError(
                    f"{self._named(OBJECTS_FILE)} cannot be read: {type(error).__name__}: {error}"
                ) from error

    def state(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the nested state: a :class:`CheckpointTensor` for each tensor, and other values."""
        paths = self.metadata.planner_data or {}
        found: dict[Keys, Any] = {}
        known: dict[Any, CheckpointTensor] = {}  # tied tensors are stored once
        for key, entry in self.metadata.state_dict_metadata.items():
            path = tuple(paths.get(key, (key,)))
            if isinstance(entry, TensorStorageMetadata):
                chunks, places = [], []
                for number, chunk in enumerate(entry.chunks):
                    info = self._info(MetadataIndex(key, chunk.offsets, number))
                    read = partial(self._tensor, info, key, torch.Size(chunk.sizes), entry.properties.dtype)
                    chunks.append((Box(tuple(chunk.offsets), tuple(chunk.sizes)), read))
                    places.append((info.relative_path, info.offset))
                tensor = CheckpointTensor(key, torch.Size(entry.size), entry.properties.dtype, chunks)
                found[path] = known.setdefault(tuple(places) or path, tensor)
            else:
                found[path] = self._load(self._info(MetadataIndex(key)), key, weights_only)
        return nest_state(found)

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

    def _tensor(self, info: Any, key: str, sizes: torch.Size, dtype: torch.dtype) -> Tensor | StoredTensor:
        reader = self._range_reader(info.relative_path)
        start = self._start(info, sizes, dtype)
        return (
            self._load_tensor(info, key, sizes, dtype) if start is None else StoredTensor(reader, start, dtype, sizes)
        )

    def _range_reader(self, name: str) -> RangeReader:
        if name not in self._range_readers:
            if self._local_file(name) is None:
                self.check([name])  # which downloads it
            with self._file_errors(name):
                self._range_readers[name] = RangeReader(self._local_file(name) or name)
        return self._range_readers[name]

    def _load_tensor(self, info: Any, key: str, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        value = self._load(info, key)
        if not isinstance(value, Tensor) or value.shape != sizes or value.dtype != dtype:
            raise CheckpointError(f"{self._named(info.relative_path)} holds something else where {key!r} should be.")
        return value

    def _start(self, info: Any, sizes: torch.Size, dtype: torch.dtype) -> int | None:
        """Return the position of a chunk's values in its file; None if ``torch.load`` must read the chunk.

        Our files have been compared with their checksums; files of other programs must be inspected.
        """
        count = sizes.numel() * dtype.itemsize
        with self._open_slice(info) as part:
            try:
                if self.manifest is None and not _is_plain_tensor(part, dtype, sizes):
                    return None
                return _start_of_values(part, info.offset, count) if count else 0
            except (ValueError, zipfile.BadZipFile):
                return None

    def _load(self, info: Any, key: str, weights_only: bool | None = None) -> Any:
        name = self._named(info.relative_path)
        with self._open_slice(info) as part:
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
    def _open_slice(self, info: Any) -> Iterator[Any]:
        with self.open(info.relative_path) as file:
            yield _FileSlice(file, info.offset, info.length)


class _FileSlice(RawIOBase):
    """A range of a file as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        if not len(view):
            return 0
        self._file.seek(self._offset + self._at)
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return count


def _start_of_values(part: Any, offset: int, count: int) -> int:
    """Return the position in the file of a chunk's values, as ``torch.save`` has written them."""
    with zipfile.ZipFile(part) as archive:
        found = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    if len(found) != 1 or found[0].file_size != count or found[0].compress_type:
        raise ValueError(f"something else lies at {offset}")
    begin = found[0].header_offset
    part.seek(begin)
    name, extra = LENGTHS.unpack(part.read(HEADER))
    return offset + begin + HEADER + name + extra


def _is_plain_tensor(part: Any, dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    """Return True if a chunk is one contiguous tensor in this host's byte order. Reads no values."""
    try:
        with zipfile.ZipFile(part) as archive:
            orders = [name for name in archive.namelist() if name.endswith("/byteorder")]
            if any(archive.read(name).decode() != sys.byteorder for name in orders):
                return False
        part.seek(0)
        value = torch.load(part, map_location="meta", weights_only=True)
    except Exception:  # _load() raises a better one
        return False
    return (
        type(value) is Tensor
        and (value.dtype, value.shape) == (dtype, torch.Size(sizes))
        and value.is_contiguous()
        and not (value.is_conj() or value.is_neg())
        and value.untyped_storage().nbytes() == value.numel() * value.itemsize
    )
