"""A full checkpoint where only fsspec reaches: a rank reads its own part of each value out of it, and no more.

What is not a large value is read at once, into a file of this process's memory that has holes where those are. The
first bytes of each hole say where it lies: torch maps that file, and each tensor that it makes tells where its values
are.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.archive import verify_open_archive
from lightning_zero.checkpoint.ranges import Placed
from lightning_zero.checkpoint.remote_ranges import AT_ONCE, RemoteRanges
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.raw import HEADER, header_length
from lightning_zero.checkpoint.sharded.values import CheckpointTensor
from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.layout import is_strided
from lightning_zero.sharding.mapped import SMALL, copy_small_values

__all__ = ["RemoteFile"]

EXTRA = 256  # bytes: more than what stands between the name of a part of an archive and its contents
MARK = 8  # bytes
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.Size, torch.device, torch.layout)


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
        verify_open_archive(self.ranges.opened(), self._url, part, parts, read, AT_ONCE)

    def content(self, weights_only: bool | None) -> Any:
        """What was saved, with :class:`~lightning_zero.checkpoint.sharded.values.CheckpointTensor` for large tensors; None
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

    def _content(self) -> Any:
        with zipfile.ZipFile(self.ranges.opened()) as archive:
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
        copy_small_values(small)
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
        self, holes: dict[int, int], known: dict[Any, CheckpointTensor], small: list[Tensor], value: Tensor, key: str
    ) -> Tensor:
        plain = type(value) in (Tensor, torch.nn.Parameter) and is_strided(value) and not value.__dict__
        if not plain or value.is_conj() or value.is_neg():
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
            known[about] = CheckpointTensor(key, value.shape, value.dtype, [(whole, lambda: placed)])
        return known[about]


class _Hidden(Exception):
    """There may be tensors that nobody sees."""


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
