"""Copies of a device's values in new memory of the host.

A plain copy goes through one buffer of the driver's, by one thread, into pages that the system makes as they are
touched: 75 GiB took 55 s on a host of two H100s. Here blocks come into pinned memory as fast as the link is, and
threads take them from there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from lightning_zero.sharding.reach import reach

__all__ = ["BLOCK", "copy_through", "on_host"]

BLOCK = 16 << 20  # bytes
THREADS = 8
AHEAD = 2  # blocks that come while all threads are at others
LEAST = 2 * BLOCK  # what is smaller is copied plainly


def on_host(value: Tensor) -> Tensor:
    """The same, detached, in memory of its own that is not pinned, with the same strides where nothing lies between
    elements. Waits until it is there."""
    value = value.detach()
    large = value.device.type == "cuda" and value.numel() * value.itemsize >= LEAST
    if not large or reach(value.shape, value.stride()) != value.numel():
        return value.to("cpu", copy=True)
    copy = torch.empty_like(value, device="cpu")
    if copy.stride() != value.stride():
        return value.to("cpu", copy=True)
    count = min(THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    blocks = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True) for _ in range(count + AHEAD)]
    with torch.cuda.device(value.device):
        copy_through(blocks, _bytes(value), _bytes(copy), _arrival, count)
    return copy


def copy_through(
    blocks: Sequence[Tensor], source: Tensor, target: Tensor, arrival: Callable[[], Callable[[], None]], threads: int
) -> None:
    """Copies ``source`` to ``target``, both 1-D of as many bytes, through ``blocks``, of :data:`BLOCK` bytes each.

    Args:
        blocks: nobody else's meanwhile.
        source: of a device.
        target: of the host.
        arrival: gives what waits for the copies that were started on this thread so far.
        threads: of the host, that take what has come.
    """
    _in_large_pages(target)
    free, taken = deque(blocks), deque[tuple[Future[None], Tensor]]()
    with ThreadPoolExecutor(threads) as pool:
        for begin in range(0, source.numel(), BLOCK):
            if not free:
                future, block = taken.popleft()
                future.result()
                free.append(block)
            block, piece = free.popleft(), source[begin : begin + BLOCK]
            block[: piece.numel()].copy_(piece, non_blocking=True)
            address = target.data_ptr() + begin
            taken.append((pool.submit(_take, block.data_ptr(), address, piece.numel(), arrival()), block))
        for future, _ in taken:
            future.result()


def _take(begin: int, address: int, count: int, arrived: Callable[[], None]) -> None:
    arrived()
    ctypes.memmove(address, begin, count)


def _arrival() -> Callable[[], None]:
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event.synchronize


def _bytes(value: Tensor) -> Tensor:
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


def _in_large_pages(memory: Tensor) -> None:
    """Where the system has some, it makes them in a fraction of the time; it may say no."""
    advise, page = getattr(ctypes.CDLL(None), "madvise", None), mmap.PAGESIZE
    begin, end = -(-memory.data_ptr() // page) * page, (memory.data_ptr() + memory.numel()) // page * page
    if advise is not None and end > begin:
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), getattr(mmap, "MADV_HUGEPAGE", 14))
