"""Values that lie in a file that is mapped: copied by the system, which tells of what it cannot read.

Who reads such memory himself is ended by a signal, without a word, where somebody has cut the file off meanwhile, or
its disk is gone. The system's copy of a process's own memory ends with a number there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.chunked_io import read_in_chunks
from lightning_zero.sharding.layout import ShardLayout, is_strided
from lightning_zero.sharding.madvise import advise
from lightning_zero.sharding.tensor_extent import should_read_gaps, extent

__all__ = ["Mapped", "copy_mapped", "mapped", "copy_small_values"]

BLOCK = 16 << 20  # bytes
THREADS = 4
SMALL = 1 << 16  # bytes
REFUSED = (errno.ENOSYS, errno.EPERM)  # by systems without that call, or rules for containers


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("length", ctypes.c_size_t))


def copy_mapped(values: Tensor, into: Tensor) -> None:
    """``into.copy_(values)``, where a file may lie under ``values``.

    Raises:
        CheckpointError: the file ends before them, or cannot be read any more.
    """
    if not _is_plain(values):
        into.copy_(values)
    elif not values.is_contiguous() or not into.is_contiguous():
        into.copy_(_fetched(values))
    elif _is_plain(into) and into.dtype == values.dtype:
        _read(values, into)
    else:
        source, target = values.reshape(-1), into.view(-1)
        count = max(1, min(BLOCK // values.itemsize, source.numel()))
        block = torch.empty(count, dtype=values.dtype, pin_memory=into.is_cuda)
        for begin in range(0, source.numel(), count):
            piece = source[begin : begin + count]
            _read(piece, block[: piece.numel()])
            target[begin : begin + count].copy_(block[: piece.numel()])


class Mapped:
    """A whole value of which a rank takes its part, as :meth:`ShardLayout.write` asks for it."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self.shape, self.dtype, self.device = values.shape, values.dtype, values.device

    def read_part(self, shard: Tensor, layout: ShardLayout, number: int) -> None:
        """Writes the elements of shard ``number`` into the 1-D ``shard``, and zeros into its padding."""
        begin, end = layout.shard_range(number)
        permute_to_memory = layout.permute_to_memory(self._values)
        if not permute_to_memory.is_contiguous():
            permute_to_memory = layout.permute_to_memory(_fetched(self._values)).contiguous()
        copy_mapped(permute_to_memory.reshape(-1)[begin:end], shard[: end - begin])
        shard[end - begin :].zero_()


def mapped(values: Tensor) -> Tensor:
    """For :meth:`ShardLayout.write`: ``values``, which may lie in a file."""
    return Mapped(values.detach()) if _is_plain(values) else values  # type: ignore[return-value]


def copy_small_values(values: Iterable[Tensor]) -> None:
    """Gives small ones memory of their own, in place: what is not cut is read by others, who know nothing of files.
    What shares memory goes on doing so."""
    taken: dict[int, Tensor] = {}
    for value in values:
        if not _is_plain(value) or not 0 < (storage := value.untyped_storage()).nbytes() <= SMALL:
            continue
        if storage.data_ptr() not in taken:
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
            _read(torch.empty(0, dtype=torch.uint8).set_(storage), copy)  # type: ignore[call-overload]
            taken[storage.data_ptr()] = copy
        whole = taken[storage.data_ptr()].untyped_storage()
        made = torch.empty(0, dtype=value.dtype)
        value.data = made.set_(whole, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]


def _is_plain(value: Tensor) -> bool:
    """Whether its memory holds its elements as they are."""
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and is_strided(value)
        and not (value.is_conj() or value.is_neg())
    )


def _fetched(values: Tensor) -> Tensor:
    """The same in memory of its own: with what lies between its elements, unless that is much."""
    if not values.numel():
        return torch.empty_like(values)
    span = extent(values.shape, values.stride())
    if should_read_gaps(values, BLOCK):
        flat = torch.empty(span, dtype=values.dtype)
        _read(values.as_strided((span,), (1,)), flat)
        return flat.as_strided(values.shape, values.stride())
    return torch.stack([_fetched(row) for row in values])


def _read(values: Tensor, into: Tensor) -> None:
    """Of one piece of memory each, with the same bytes."""
    total = values.numel() * values.itemsize
    # What is not in memory yet comes in large reads then, in its order, and not page by page, as somebody asks for it,
    # and in that of threads.
    advise(values.data_ptr(), total, mmap.MADV_WILLNEED)
    most = min(THREADS, torch.get_num_threads())
    read_in_chunks(total, BLOCK, most, lambda begin, end: _read_block(values, into, begin, end - begin))


def _read_block(values: Tensor, into: Tensor, begin: int, length: int) -> None:
    copy = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    source = values.data_ptr() + begin
    done = 0
    while done < length:
        at, target = (_Range(start + done, length - done) for start in (source, into.data_ptr() + begin))
        count, number = -1, errno.ENOSYS
        if copy is not None:
            copy.restype = ctypes.c_ssize_t
            count = copy(os.getpid(), ctypes.byref(target), 1, ctypes.byref(at), 1, ctypes.c_ulong(0))
            number = ctypes.get_errno()
        if count > 0:
            done += count
            continue
        file = None if number in REFUSED else _file_at(source + done)
        if file is not None:
            raise CheckpointError(
                f"{file} was cut off, or its disk is gone, while it was being read ({os.strerror(number)}). Use "
                "another checkpoint."
            )
        ctypes.memmove(target.begin, at.begin, length - done)  # no file: memory of a driver's, say
        return


def _file_at(address: int) -> str | None:
    """Of which file the memory there is; None: of none."""
    with suppress(OSError), open("/proc/self/maps", "rb") as lines:
        for line in lines:
            words = line.rstrip(b"\n").split(maxsplit=5)
            begin, end = (int(word, 16) for word in words[0].split(b"-"))
            if begin <= address < end:
                name = os.fsdecode(words[5]) if len(words) > 5 else ""
                devices = name.startswith("/dev/") and not name.startswith("/dev/shm/")
                return name if name.startswith("/") and not devices else None
    return None
