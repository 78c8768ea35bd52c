"""Some steps of a training, and what they came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_zero.profiling.moments import DeviceTimer

__all__ = ["EngineCounters", "BatchTotals", "StepWindow"]


@dataclass(frozen=True)
class EngineCounters:
    """Running counts of an engine: bytes of whole weights gathered and of buckets reduced, graphs and optimizer steps
    replayed, and how often something began to be compiled, or was."""

    gathered: int
    reduced: int
    replayed_graphs: int
    replayed_steps: int
    compiled: int

    def since(self, before: EngineCounters) -> EngineCounters:
        return EngineCounters(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


@dataclass
class BatchTotals:
    """What the batches of a window held, on this rank."""

    batches: int = 0
    samples: int = 0
    lengths: int = 0
    flops: float = 0.0


@dataclass
class StepWindow:
    """Protocol: made when its first step begins; :meth:`pass_begins` and :meth:`pass_ends` around the forward and
    backward of a batch, of which the first is measured; :meth:`pause` and :meth:`resume` around what is no training;
    :meth:`end`, and :meth:`seconds` once :attr:`over`. Nothing waits for the device.

    Attributes:
        tally: of the batches.
        during: counts of the window, once it has ended.
        pass_gathered: bytes that the measured pass gathered.
    """

    device: torch.device
    counts: Callable[[], EngineCounters]
    tally: BatchTotals = field(default_factory=BatchTotals)
    during: EngineCounters | None = None
    pass_gathered: int = 0

    def __post_init__(self) -> None:
        self._moments = DeviceTimer(self.device)
        self._begun, self._before = self._moments.now(), self.counts()
        self._pauses: list[tuple[Any, Any]] = []
        self._paused: Any = None
        self._pass: list[Any] = []
        self._ended: Any = None

    def pass_begins(self) -> None:
        if not self._pass:
            self._pass.append(self._moments.now())
            self.pass_gathered = -self.counts().gathered

    def pass_ends(self) -> None:
        if len(self._pass) == 1:
            self._pass.append(self._moments.now())
            self.pass_gathered += self.counts().gathered

    def pause(self) -> None:
        self._paused = self._moments.now()

    def resume(self) -> None:
        if self._paused is not None:
            self._pauses.append((self._paused, self._moments.now()))
            self._paused = None

    def end(self) -> None:
        self.resume()
        self._ended = self._moments.now()
        self.during = self.counts().since(self._before)

    @property
    def over(self) -> bool:
        """Whether the device has come to the end."""
        return self._moments.is_done(self._ended)

    def seconds(self) -> float:
        """From the beginning to the end, without pauses. Waits for the device where it is not :attr:`over`."""
        paused = sum(self._moments.elapsed_s(*pause) for pause in self._pauses)
        return self._moments.elapsed_s(self._begun, self._ended) - paused

    def pass_seconds(self) -> float | None:
        """Of the measured forward and backward; None where there was none."""
        return self._moments.elapsed_s(*self._pass) if len(self._pass) == 2 else None
