"""Copy tensors from the device to host memory, and from memory-mapped files.

``copy_to_host`` copies a device tensor to unpinned memory. ``Tensor.cpu()`` uses one driver buffer and one thread, and
the kernel creates pages on first touch; here blocks arrive in pinned memory at link speed, and threads copy them on.
torch's ``StateDictStager`` either makes ordinary copies or keeps all of the state pinned.

``copy_mapped`` reads tensors that may be in a mapped file. A plain read of such memory ends the process by SIGBUS if
the file is truncated or its disk fails. ``process_vm_readv`` of the own process returns an error code instead.
"""

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

BLOCK_BYTES = 16 << 20  # of a pinned block: large enough for full link speed
COPY_THREADS = 8
BLOCKS_IN_FLIGHT = 2  # pinned blocks that receive while all threads copy
MIN_BLOCKWISE_BYTES = 2 * BLOCK_BYTES  # smaller tensors: Tensor.to()


def copy_to_host(value: Tensor) -> Tensor:
    """Return a detached copy in unpinned CPU memory, after the copy has finished.

    The strides are kept if there are no gaps between elements.
    """
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
    """Copy ``source`` to ``target``, both 1-D tensors of the same number of bytes, through pinned blocks.

    Args:
        blocks: of :data:`BLOCK_BYTES` bytes each, not used by others meanwhile.
        arrival: returns a function that waits for the copies started on this thread so far.
        threads: number of threads that copy from blocks to ``target``.
    """
    # Huge pages are created in a fraction of the time.
    madvise(target.data_ptr(), target.numel(), mmap.MADV_HUGEPAGE)
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
    """Return a function that waits for all work given to the current stream of the device so far."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _flat_bytes(value: Tensor) -> Tensor:
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


READ_BYTES = 16 << 20  # of one system call
READ_THREADS = 4
SMALL_BYTES = 1 << 16  # largest storage that copy_small_values() copies
SYSCALL_UNAVAILABLE = (errno.ENOSYS, errno.EPERM)  # on systems without the call, or forbidden in a container


class _IoVec(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("length", ctypes.c_size_t))


def copy_mapped(values: Tensor, into: Tensor) -> None:
    """Do ``into.copy_(values)`` for values that may be in a mapped file; raise CheckpointError."""
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
    """Wrap a full value in a mapped file, of which :meth:`ShardLayout.write` reads only one shard."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self.shape, self.dtype, self.device = values.shape, values.dtype, values.device

    def read_part(self, shard: Tensor, layout: ShardLayout, number: int) -> None:
        """Write the elements of shard ``number`` into the 1-D ``shard``, and zeros into its padding."""
        begin, end = layout.shard_range(number)
        permute_to_memory = layout.permute_to_memory(self._values)
        if not permute_to_memory.is_contiguous():
            permute_to_memory = layout.permute_to_memory(_read_copy(self._values)).contiguous()
        copy_mapped(permute_to_memory.reshape(-1)[begin:end], shard[: end - begin])
        shard[end - begin :].zero_()


def as_mapped(values: Tensor) -> Tensor:
    """Return ``values`` wrapped for :meth:`ShardLayout.write`, if they may be in a mapped file."""
    return MappedTensor(values.detach()) if _is_dense_cpu(values) else values  # type: ignore[return-value]


def copy_small_values(values: Iterable[Tensor]) -> None:
    """Give small tensors their own memory, in place. Shared memory stays shared.

    Other code reads values that are not sharded, and does not expect a mapped file.
    """
    taken: dict[int, Tensor] = {}
    for value in values:
        if not _is_dense_cpu(value) or not 0 < (storage := value.untyped_storage()).nbytes() <= SMALL_BYTES:
            continue
        if storage.data_ptr() not in taken:
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
            _read(torch.empty(0, dtype=torch.uint8).set_(storage), copy)  # type: ignore[call-overload]
            taken[storage.data_ptr()] = copy
        storage_copy = taken[storage.data_ptr()].untyped_storage()
        made = torch.empty(0, dtype=value.dtype)
        value.data = made.set_(storage_copy, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]


def _is_dense_cpu(value: Tensor) -> bool:
    """Return True if the tensor's CPU memory holds its elements as they are."""
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and is_strided(value)
        and not (value.is_conj() or value.is_neg())
    )


def _read_copy(values: Tensor) -> Tensor:
    """Return a copy, read with the gaps between elements unless these are large."""
    if not values.numel():
        return torch.empty_like(values)
    span = extent(values.shape, values.stride())
    if should_read_gaps(values, READ_BYTES):
        flat = torch.empty(span, dtype=values.dtype)
        _read(values.as_strided((span,), (1,)), flat)
        return flat.as_strided(values.shape, values.stride())
    return torch.stack([_read_copy(row) for row in values])


def _read(values: Tensor, into: Tensor) -> None:
    """Copy bytes between two contiguous tensors of the same size."""
    total = values.numel() * values.itemsize
    # The system then reads ahead in large, ordered requests, not page by page in the order of the threads.
    madvise(values.data_ptr(), total, mmap.MADV_WILLNEED)
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
        ctypes.memmove(target.begin, at.begin, length - done)  # not a file, for example memory of a driver
        return


def _file_at(address: int) -> str | None:
    """Return the name of the file that is mapped at this address, or None."""
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
    """Call ``read(begin, end)`` for chunks of ``block`` bytes of ``total``, in at most ``most`` threads.

    Returns, or raises the first error, after all threads have ended: a thread that goes on would write into freed
    memory.
    """
    pieces = [(begin, min(begin + block, total)) for begin in range(0, total, block)]
    if len(pieces) <= 1:
        read(0, total)
        return
    with ThreadPoolExecutor(min(most, len(pieces))) as threads:
        ends = [threads.submit(read, *piece) for piece in pieces]
    for end in ends:
        end.result()


def madvise(begin: int, nbytes: int, advice: int) -> None:
    """Call ``madvise`` for all pages of these bytes, if there are several. The system may ignore it."""
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is not None and nbytes > mmap.PAGESIZE:
        first = begin - begin % mmap.PAGESIZE
        call(ctypes.c_void_p(first), ctypes.c_size_t(begin + nbytes - first), advice)
