"""A full checkpoint where only fsspec reaches: a rank reads its own part of each value out of it, and no more.

What is not a large value is read at once, into a file of this process's memory that has holes where those are. The
first bytes of each hole say where it lies: torch maps that file, and each tensor that it makes tells where its values
are.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.archive import check_opened
from lightning_zero.checkpoint.locating import located
from lightning_zero.checkpoint.ranges import Placed
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.raw import HEADER, header_length
from lightning_zero.checkpoint.sharded.values import SavedValue
from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.mapped import SMALL, take_small

__all__ = ["RemoteFile", "RemoteRanges", "exists"]

BLOCK, AT_ONCE = 8 << 20, 4  # bytes of a request, and requests
BUFFER = 1 << 18  # bytes: for who reads a few of them here and there
EXTRA = 256  # bytes: more than what stands between the name of a part of an archive and its contents
MARK = 8  # bytes
# By which a file is known again; not when it was last read.
KNOWN_BY = {"size", "etag", "generation", "version_id", "blob_id", "md5hash", "crc32c"}
KNOWN_BY |= {"lastmodified", "last_modified", "modified", "last_write_time", "mtime", "created", "updated"}
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.Size, torch.device, torch.layout)


class RemoteRanges:
    """Of a file, by its URL.

    Attributes:
        size: in bytes.
        identity: another one for each file that stands there, as far as its store tells.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._fs, self._place = located(url)
        self.identity = self._look()
        self.size = int(self.identity["size"])

    def read(self, begin: int, into: memoryview) -> None:
        blocks = [(begin + at, begin + min(at + BLOCK, len(into))) for at in range(0, len(into), BLOCK)]
        done = 0
        for first in range(0, len(blocks), AT_ONCE):
            for data in self.several(blocks[first : first + AT_ONCE]):
                into[done : done + len(data)] = data
                done += len(data)

    def several(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes from the first to before the second of each, at once where the store can.

        Raises:
            CheckpointError: it is another file by now, or ends too early.
        """
        begins, ends = zip(*spans, strict=True)
        try:
            found = self._fs.cat_ranges([self._place] * len(spans), list(begins), list(ends), on_error="raise")
            now = self._look()
        except Exception as error:  # stores raise their own
            raise CheckpointError(f"{self._url} cannot be read: {type(error).__name__}: {error}") from error
        if now != self.identity:
            raise CheckpointError(f"{self._url} was replaced by another one while it was being loaded. Load it again.")
        for data, begin, end in zip(found, begins, ends, strict=True):
            if len(data) != end - begin:
                raise CheckpointError(f"{self._url} gave {len(data):,} bytes where {end - begin:,} were asked for.")
        return list(found)

    def _look(self) -> dict[str, str]:
        self._fs.invalidate_cache(self._place)
        return {key: str(value) for key, value in self._fs.info(self._place).items() if key.lower() in KNOWN_BY}


class RemoteFile:
    """A full checkpoint at a URL.

    Attributes:
        ranges: of it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.ranges = RemoteRanges(url)

    def check(self, part: int, parts: int, read: Callable[[int], None] = lambda count: None) -> None:
        """Compares one of so many parts with their checksums.

        Raises:
            CheckpointError: the file is damaged.
        """
        check_opened(self._opened(), self._url, part, parts, read, AT_ONCE * BLOCK)

    def content(self, weights_only: bool | None) -> Any:
        """What was saved, with :class:`~lightning_zero.checkpoint.sharded.values.SavedValue` for large tensors; None
        where all of it must be read: it is no archive, or holds what may hide tensors, as anything may that
        ``weights_only=False`` unpickles.

        Raises:
            CheckpointError: it cannot be read.
        """
        if weights_only is False or not hasattr(os, "memfd_create"):
            return None
        try:
            return self._content()
        except (CheckpointError, pickle.UnpicklingError):
            raise
        except Exception:  # no archive, or none as torch writes them: who reads all of it says what is wrong
            return None

    def _opened(self) -> io.BufferedReader:
        return io.BufferedReader(_File(self.ranges), BUFFER)

    def _content(self) -> Any:
        with zipfile.ZipFile(self._opened()) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
            directory = archive.start_dir
        if any(entry.compress_type for entry in entries):
            raise _Hidden
        number = os.memfd_create("checkpoint")
        try:
            os.truncate(number, self.ranges.size)
            holes = self._fill(number, entries, directory)
            content = [torch.load(f"/proc/self/fd/{number}", map_location="cpu", mmap=True, weights_only=True)]
        finally:
            os.close(number)  # mapped memory goes on
        small: list[Tensor] = []
        _replace(content, "", partial(self._saved, holes, {}, small))
        take_small(small)
        return content[0]

    def _fill(self, number: int, entries: Sequence[zipfile.ZipInfo], directory: int) -> dict[int, int]:
        """Writes all but the values; gives where those lie, and their bytes."""
        ends = [entry.header_offset for entry in entries[1:]] + [directory]
        spans: list[tuple[int, int]] = []
        for entry, end in zip(entries, ends, strict=True):
            begin = entry.header_offset
            stop = min(end, begin + HEADER + len(entry.filename.encode()) + EXTRA) if _is_hole(entry) else end
            if spans and spans[-1][1] == begin:
                begin = spans.pop()[0]
            spans.append((begin, stop))
        spans.append((directory, self.ranges.size))
        for (begin, _), data in zip(spans, self.ranges.several(spans), strict=True):
            os.pwrite(number, data, begin)
        holes = {}
        for entry in filter(_is_hole, entries):
            start = entry.header_offset + header_length(os.pread(number, HEADER, entry.header_offset))
            os.pwrite(number, start.to_bytes(MARK, "little"), start)
            holes[start] = entry.file_size
        return holes

    def _saved(
        self, holes: dict[int, int], known: dict[Any, SavedValue], small: list[Tensor], value: Tensor, key: str
    ) -> Tensor:
        plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.__dict__
        if not plain or value.is_conj() or value.is_neg() or value.is_quantized:
            raise _Hidden
        storage = value.untyped_storage()
        if storage.nbytes() <= SMALL:
            small.append(value)
            return value
        mark = bytes(storage[:MARK].tolist())
        start = int.from_bytes(mark, "little")
        if holes.get(start) != storage.nbytes():
            raise _Hidden
        about = (start, value.storage_offset(), value.dtype, value.shape, value.stride())
        if about not in known:  # tied ones are one
            begin = start + int(value.storage_offset()) * value.itemsize
            placed = Placed(self.ranges, begin, value.dtype, value.shape, value.stride())
            whole = Box((0,) * value.dim(), tuple(value.shape))
            known[about] = SavedValue(key, value.shape, value.dtype, [(whole, lambda: placed)])
        return known[about]


def exists(url: str) -> bool:
    """Whether something is there now, whatever this host remembers."""
    fs, place = located(url)
    fs.invalidate_cache(place)
    return bool(fs.exists(place))


class _Hidden(Exception):
    """There may be tensors that nobody sees."""


class _File(io.RawIOBase):
    """To be read by those who know files only."""

    def __init__(self, ranges: RemoteRanges) -> None:
        self._ranges, self._at = ranges, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._ranges.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._ranges.size - self._at)]
        if len(view):
            self._ranges.read(self._at, view)
        self._at += len(view)
        return len(view)


def _is_hole(entry: zipfile.ZipInfo) -> bool:
    return "/data/" in entry.filename and entry.file_size > SMALL


def _replace(value: Any, key: str, saved: Callable[[Tensor, str], Tensor]) -> Any:
    """What stands for ``value``, in place where that may be changed."""
    if isinstance(value, Tensor):
        return saved(value, key)
    if type(value) in (dict, OrderedDict, defaultdict):
        for name in value:
            value[name] = _replace(value[name], f"{key}.{name}" if key else str(name), saved)
        return value
    if type(value) is list:
        value[:] = [_replace(one, f"{key}.{number}" if key else "", saved) for number, one in enumerate(value)]
        return value
    if type(value) is tuple:
        return tuple(_replace(one, f"{key}.{number}", saved) for number, one in enumerate(value))
    if type(value) in PLAIN or (type(value) in (set, frozenset) and all(type(one) in PLAIN for one in value)):
        return value
    raise _Hidden
