"""Copies of a device's values in new memory of the host.

A plain copy goes through one buffer of the driver's, by one thread, into pages that the system makes as they are
touched: 75 GiB took 55 s on a host of two H100s. Here blocks come into pinned memory as fast as the link is, and
threads take them from there.


---

Values that lie in a file that is mapped: copied by the system, which tells of what it cannot read.

Who reads such memory himself is ended by a signal, without a word, where somebody has cut the file off meanwhile, or
its disk is gone. The system's copy of a process's own memory ends with a number there.


---

Large reads in pieces, a few of them at once.

---

What the system is told of memory beforehand."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.layout import ShardLayout, extent, is_strided, should_read_gaps

__all__ = [
    "BLOCK_BYTES",
    "MappedTensor",
    "advise",
    "copy_mapped",
    "copy_small_values",
    "copy_to_host",
    "copy_via_blocks",
    "copy_waiter",
    "mapped",
    "read_in_chunks",
]

BLOCK_BYTES = 16 << 20  # bytes
COPY_THREADS = 8
BLOCKS_IN_FLIGHT = 2  # blocks that come while all threads are at others
MIN_BLOCKWISE_BYTES = 2 * BLOCK_BYTES  # what is smaller is copied plainly


def copy_to_host(value: Tensor) -> Tensor:
    """The same, detached, in memory of its own that is not pinned, with the same strides where nothing lies between
    elements. Waits until it is there."""
    value = value.detach()
    large = value.device.type == "cuda" and value.numel() * value.itemsize >= MIN_BLOCKWISE_BYTES
    if not large or extent(value.shape, value.stride()) != value.numel():
        return value.to("cpu", copy=True)
    copy = torch.empty_like(value, device="cpu")
    if copy.stride() != value.stride():
        return value.to("cpu", copy=True)
    count = min(COPY_THREADS, len(os.sched_getaffinity(0)))
    blocks = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(count + BLOCKS_IN_FLIGHT)]
    copy_via_blocks(blocks, _flat_bytes(value), _flat_bytes(copy), partial(copy_waiter, value.device), count)
    return copy


def copy_via_blocks(
    blocks: Sequence[Tensor], source: Tensor, target: Tensor, arrival: Callable[[], Callable[[], object]], threads: int
) -> None:
    """Copies ``source`` to ``target``, both 1-D of as many bytes, through ``blocks``, of :data:`BLOCK_BYTES` bytes each.

    Args:
        blocks: nobody else's meanwhile.
        source: of a device.
        target: of the host.
        arrival: gives what waits for the copies that were started on this thread so far.
        threads: of the host, that take what has come.
    """
    # Where the system has large pages, it makes them in a fraction of the time.
    advise(target.data_ptr(), target.numel(), mmap.MADV_HUGEPAGE)
    free, taken = deque(blocks), deque[tuple[Future[None], Tensor]]()
    with ThreadPoolExecutor(threads) as pool:
        for begin in range(0, source.numel(), BLOCK_BYTES):
            if not free:
                future, block = taken.popleft()
                future.result()
                free.append(block)
            block, piece = free.popleft(), source[begin : begin + BLOCK_BYTES]
            block[: piece.numel()].copy_(piece, non_blocking=True)
            address = target.data_ptr() + begin
            taken.append((pool.submit(_copy_block, block.data_ptr(), address, piece.numel(), arrival()), block))
        for future, _ in taken:
            future.result()


def _copy_block(begin: int, address: int, count: int, arrived: Callable[[], object]) -> None:
    arrived()
    ctypes.memmove(address, begin, count)


def copy_waiter(device: torch.device) -> Callable[[], object]:
    """Waits until the device is done with what this thread has given it before, on its current stream."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _flat_bytes(value: Tensor) -> Tensor:
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


READ_BYTES = 16 << 20  # bytes
READ_THREADS = 4
SMALL_BYTES = 1 << 16  # bytes
SYSCALL_UNAVAILABLE = (errno.ENOSYS, errno.EPERM)  # by systems without that call, or rules for containers


class _IoVec(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("length", ctypes.c_size_t))


def copy_mapped(values: Tensor, into: Tensor) -> None:
    """``into.copy_(values)``, where a file may lie under ``values``.

    Raises:
        CheckpointError: the file ends before them, or cannot be read any more.
    """
    if not _is_dense_cpu(values):
        into.copy_(values)
    elif not values.is_contiguous() or not into.is_contiguous():
        into.copy_(_read_copy(values))
    elif _is_dense_cpu(into) and into.dtype == values.dtype:
        _read(values, into)
    else:
        source, target = values.reshape(-1), into.view(-1)
        count = max(1, min(READ_BYTES // values.itemsize, source.numel()))
        block = torch.empty(count, dtype=values.dtype, pin_memory=into.is_cuda)
        for begin in range(0, source.numel(), count):
            piece = source[begin : begin + count]
            _read(piece, block[: piece.numel()])
            target[begin : begin + count].copy_(block[: piece.numel()])


class MappedTensor:
    """A whole value of which a rank takes its part, as :meth:`ShardLayout.write` asks for it."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self.shape, self.dtype, self.device = values.shape, values.dtype, values.device

    def read_part(self, shard: Tensor, layout: ShardLayout, number: int) -> None:
        """Writes the elements of shard ``number`` into the 1-D ``shard``, and zeros into its padding."""
        begin, end = layout.shard_range(number)
        permute_to_memory = layout.permute_to_memory(self._values)
        if not permute_to_memory.is_contiguous():
            permute_to_memory = layout.permute_to_memory(_read_copy(self._values)).contiguous()
        copy_mapped(permute_to_memory.reshape(-1)[begin:end], shard[: end - begin])
        shard[end - begin :].zero_()


def mapped(values: Tensor) -> Tensor:
    """For :meth:`ShardLayout.write`: ``values``, which may lie in a file."""
    return MappedTensor(values.detach()) if _is_dense_cpu(values) else values  # type: ignore[return-value]


def copy_small_values(values: Iterable[Tensor]) -> None:
    """Gives small ones memory of their own, in place: what is not cut is read by others, who know nothing of files.
    What shares memory goes on doing so."""
    taken: dict[int, Tensor] = {}
    for value in values:
        if not _is_dense_cpu(value) or not 0 < (storage := value.untyped_storage()).nbytes() <= SMALL_BYTES:
            continue
        if storage.data_ptr() not in taken:
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
            _read(torch.empty(0, dtype=torch.uint8).set_(storage), copy)  # type: ignore[call-overload]
            taken[storage.data_ptr()] = copy
        whole = taken[storage.data_ptr()].untyped_storage()
        made = torch.empty(0, dtype=value.dtype)
        value.data = made.set_(whole, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]


def _is_dense_cpu(value: Tensor) -> bool:
    """Whether its memory holds its elements as they are."""
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and is_strided(value)
        and not (value.is_conj() or value.is_neg())
    )


def _read_copy(values: Tensor) -> Tensor:
    """The same in memory of its own: with what lies between its elements, unless that is much."""
    if not values.numel():
        return torch.empty_like(values)
    span = extent(values.shape, values.stride())
    if should_read_gaps(values, READ_BYTES):
        flat = torch.empty(span, dtype=values.dtype)
        _read(values.as_strided((span,), (1,)), flat)
        return flat.as_strided(values.shape, values.stride())
    return torch.stack([_read_copy(row) for row in values])


def _read(values: Tensor, into: Tensor) -> None:
    """Of one piece of memory each, with the same bytes."""
    total = values.numel() * values.itemsize
    # What is not in memory yet comes in large reads then, in its order, and not page by page, as somebody asks for it,
    # and in that of threads.
    advise(values.data_ptr(), total, mmap.MADV_WILLNEED)
    most = min(READ_THREADS, torch.get_num_threads())
    read_in_chunks(total, READ_BYTES, most, lambda begin, end: _read_block(values, into, begin, end - begin))


def _read_block(values: Tensor, into: Tensor, begin: int, length: int) -> None:
    copy = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    source = values.data_ptr() + begin
    done = 0
    while done < length:
        at, target = (_IoVec(start + done, length - done) for start in (source, into.data_ptr() + begin))
        count, number = -1, errno.ENOSYS
        if copy is not None:
            copy.restype = ctypes.c_ssize_t
            count = copy(os.getpid(), ctypes.byref(target), 1, ctypes.byref(at), 1, ctypes.c_ulong(0))
            number = ctypes.get_errno()
        if count > 0:
            done += count
            continue
        file = None if number in SYSCALL_UNAVAILABLE else _file_at(source + done)
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


def read_in_chunks(total: int, block: int, most: int, read: Callable[[int, int], None]) -> None:
    """Calls ``read(begin, end)`` for pieces of at most ``block`` bytes of all ``total``, by at most so many threads;
    returns, or raises what one has raised, when all have ended: a thread that goes on would write into memory that is
    somebody else's by then."""
    pieces = [(begin, min(begin + block, total)) for begin in range(0, total, block)]
    if len(pieces) <= 1:
        read(0, total)
        return
    with ThreadPoolExecutor(min(most, len(pieces))) as threads:
        ends = [threads.submit(read, *piece) for piece in pieces]
    for end in ends:
        end.result()


def advise(begin: int, nbytes: int, advice: int) -> None:
    """``madvise`` for all pages that these bytes lie in, of more than one page, where the system has such a call; it
    may say no.

    Args:
        begin: an address.
        advice: a number such as ``mmap.MADV_WILLNEED``.
    """
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is not None and nbytes > mmap.PAGESIZE:
        first = begin - begin % mmap.PAGESIZE
        call(ctypes.c_void_p(first), ctypes.c_size_t(begin + nbytes - first), advice)
