"""The ways on which copies between host and device go beside what the device computes.

Three lanes work side by side, each in its own order: copies in, copies out, and compute, which is the device's current
stream. An event is all that a lane has been given up to a moment; a lane that waits for one does nothing further until
that is done. ``staging_ring.py`` decides which waits are needed. Tests replace the lanes by some that run in the worst
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Copy", "CopyStreams", "CpuCopyStreams", "CudaCopyStreams", "copy_streams_of"]

Copy = tuple[Tensor, Tensor]  # to, from
Event = Any


class CopyStreams(Protocol):
    """Takes copies. Nothing here waits on the host."""

    def use(self, memory: Tensor) -> None:
        """Copies will go there, and from there: once it is given back, whoever gets it next waits for them."""
        ...

    def bring(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        """From the host, once all of ``after`` is done."""
        ...

    def take(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        """To the host, likewise."""
        ...

    def now(self) -> Event:
        """All that compute has been given so far."""
        ...

    def wait(self, event: Event) -> None:
        """Compute goes on behind it."""
        ...


class CudaCopyStreams:
    """Of a GPU: copies on two streams, one for each direction, which its copy engines serve at once. May be captured
    in a CUDA graph, if all that is waited for inside was given to the lanes inside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def use(self, memory: Tensor) -> None:
        for stream in (self._in, self._out):
            memory.record_stream(stream)

    def bring(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        return _on(self._in, copies, after)

    def take(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        return _on(self._out, copies, after)

    def now(self) -> Event:
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


def _on(stream: torch.cuda.Stream, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
    for event in after:
        stream.wait_event(event)
    with torch.cuda.stream(stream):
        for to, source in copies:
            to.copy_(source, non_blocking=True)
    return stream.record_event()


class CpuCopyStreams:
    """Of a CPU: whatever is given is done at once, so nobody ever waits."""

    def use(self, memory: Tensor) -> None:
        pass

    def bring(self, copies: Sequence[Copy], after: Sequence[Event]) -> Event:
        for to, source in copies:
            to.copy_(source)

    take = bring

    def now(self) -> Event:
        return None

    def wait(self, event: Event) -> None:
        pass


def copy_streams_of(device: torch.device) -> CopyStreams:
    return CudaCopyStreams(device) if device.type == "cuda" else CpuCopyStreams()
