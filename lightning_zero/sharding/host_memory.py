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
from functools import partial

import torch
from torch import Tensor

from lightning_zero.sharding.madvise import advise
from lightning_zero.sharding.tensor_extent import extent

__all__ = ["BLOCK", "copy_through", "copy_waiter", "copy_to_host"]

BLOCK = 16 << 20  # bytes
THREADS = 8
AHEAD = 2  # blocks that come while all threads are at others
LEAST = 2 * BLOCK  # what is smaller is copied plainly


def copy_to_host(value: Tensor) -> Tensor:
    """The same, detached, in memory of its own that is not pinned, with the same strides where nothing lies between
    elements. Waits until it is there."""
    value = value.detach()
    large = value.device.type == "cuda" and value.numel() * value.itemsize >= LEAST
    if not large or extent(value.shape, value.stride()) != value.numel():
        return value.to("cpu", copy=True)
    copy = torch.empty_like(value, device="cpu")
    if copy.stride() != value.stride():
        return value.to("cpu", copy=True)
    count = min(THREADS, len(os.sched_getaffinity(0)))
    blocks = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True) for _ in range(count + AHEAD)]
    copy_through(blocks, _bytes(value), _bytes(copy), partial(copy_waiter, value.device), count)
    return copy


def copy_through(
    blocks: Sequence[Tensor], source: Tensor, target: Tensor, arrival: Callable[[], Callable[[], object]], threads: int
) -> None:
    """Copies ``source`` to ``target``, both 1-D of as many bytes, through ``blocks``, of :data:`BLOCK` bytes each.

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


def _take(begin: int, address: int, count: int, arrived: Callable[[], object]) -> None:
    arrived()
    ctypes.memmove(address, begin, count)


def copy_waiter(device: torch.device) -> Callable[[], object]:
    """Waits until the device is done with what this thread has given it before, on its current stream."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _bytes(value: Tensor) -> Tensor:
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)
