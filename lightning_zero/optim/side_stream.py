"""A second stream for work that runs concurrently with that of the current stream."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """Launches functions on a stream of its own. Without a GPU they run at once, in the order of calls.

    It may be used during a capture, if :meth:`join` is called before the end.

    Args:
        device: A GPU, or None for no stream.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._stream = None if device is None else torch.cuda.Stream(device)

    def follow(self) -> None:
        """Let work launched from now on wait for that of the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def launch(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function on the stream; return one that lets the current stream wait for it."""
        if self._stream is None:
            function()
            return lambda: None
        with torch.cuda.stream(self._stream):
            function()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)

    def join(self) -> None:
        """Let the current stream wait for all functions."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
