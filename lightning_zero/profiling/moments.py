"""Moments in a training, of the host or of the device, and the seconds between them."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

__all__ = ["DeviceTimer"]


class DeviceTimer:
    """Of one device. Where it is an accelerator, a moment is an event on its current stream: the host, which may be far
    ahead, does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def is_done(self, moment: Any) -> bool:
        """Whether the device has come to it, so that :meth:`elapsed_s` need not wait."""
        return self._device.type == "cpu" or bool(moment.query())

    def elapsed_s(self, begun: Any, ended: Any) -> float:
        """Seconds. Waits for the device to come to ``ended``."""
        if self._device.type == "cpu":
            return ended - begun
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3
