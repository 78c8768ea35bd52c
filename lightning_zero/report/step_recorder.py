"""Record the parts of training steps, and memory at their ends, without waiting for the device.

:class:`StepRecorder` keeps the latest steps in which nothing was compiled. :meth:`StepRecorder.times` gives means over
the middle half of them, so that the parts add up to the step and rare events (a checkpoint) do not count.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_zero.profiling.device_gauges import DeviceTimer

FORWARD, BACKWARD, OPTIMIZER, BETWEEN = PARTS = "forward", "backward", "optimizer", "between"
MOST_STEPS = 50  # enough for a stable mean; each holds five events of the device
MEMORY_EVERY = 10  # steps between readings of memory, which cost the host about 0.1 ms each on a GPU
PROCESS = Path("/proc/self/statm")


@dataclass(frozen=True)
class StepTimes:
    """Measured times of training steps.

    Attributes:
        parts: mean seconds by part, over the middle half of the steps.
        steps: number of measured steps.
        fastest_s, slowest_s: seconds of single steps.
        batches: micro-batches of a step.
    """

    parts: dict[str, float]
    steps: int
    fastest_s: float
    slowest_s: float
    batches: int

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())


@dataclass
class _Step:
    compiled: object  # state of compilation before the step
    marks: list[tuple[str | None, Any]] = field(default_factory=list)  # None: a pause
    batches: int = 0
    ended: Any = None


class StepRecorder:
    """Record parts of steps on one device.

    Args:
        compiled: returns a value that changes if something is compiled.

    Attributes:
        memory: bytes by part, read when the part ended, of the latest step in which they were read.
        gathered_bytes: bytes that forward and backward of one micro-batch gathered; None if unknown.
    """

    def __init__(
        self,
        device: torch.device,
        compiled: Callable[[], object],
        gathered: Callable[[], int] = lambda: 0,
        step_number: int = 0,
    ) -> None:
        self._timer, self._device = DeviceTimer(device), device
        self._compiled, self._gathered = compiled, gathered
        self._steps: deque[_Step] = deque(maxlen=MOST_STEPS)
        self._step: _Step | None = None
        self._recorded, self._step_number = 0, step_number
        self._reading: dict[str, int] = {}
        self._gathered_before = 0
        self.memory: dict[str, int] = {}
        self.gathered_bytes: int | None = None

    def batch(self) -> None:
        """Begin a micro-batch, and a step if the last one has ended."""
        step = self._step
        if step is not None and step.ended is not None:
            self._finish(step, self._timer.now())
            step = None
        if step is None:
            step = self._step = _Step(self._compiled())
            self._reading = {}
            self._read(BETWEEN)
        self._gathered_before = self._gathered()
        step.batches += 1
        step.marks.append((FORWARD, self._timer.now()))

    def part(self, name: str) -> None:
        """End the current part and begin another one."""
        step = self._step
        if step is None or step.marks[-1][0] == name:
            return
        self._read(step.marks[-1][0])
        step.marks.append((name, self._timer.now()))

    def backward_ended(self) -> None:
        self.part(OPTIMIZER)
        if self._step is not None and self._step.compiled == self._compiled():
            self.gathered_bytes = self._gathered() - self._gathered_before

    def batch_ended(self, step_number: int) -> None:
        """End a micro-batch, and its step if ``step_number``, the count of optimizer steps, has changed."""
        self.part(BETWEEN)
        stepped, self._step_number = step_number != self._step_number, step_number
        if self._step is not None and stepped:
            self._step.ended = self._step.marks[-1][1]
            if self._reading and self._step.compiled == self._compiled():
                self.memory = self._reading

    def pause(self) -> None:
        """Leave out the time until :meth:`resume`, for example a validation."""
        if self._step is not None:
            self._step.marks.append((None, self._timer.now()))

    def resume(self) -> None:
        if self._step is not None and self._step.marks[-1][0] is None:
            self._step.marks.append((BETWEEN, self._timer.now()))

    def drop_unfinished(self) -> None:
        """Forget steps that the device has not ended: after a failure it may never end them."""
        ended = [step for step in self._steps if self._timer.is_done(step.ended)]
        self._steps = deque(ended, MOST_STEPS)
        if self._step is not None and (self._step.ended is None or not self._timer.is_done(self._step.ended)):
            self._step = None

    def times(self) -> StepTimes | None:
        """Return the times; None if no step was measured. Waits for the device to end the recorded steps."""
        found, last = [], self._step
        unfinished = [] if last is None or last.ended is None or last.compiled != self._compiled() else [last]
        for step in (*self._steps, *unfinished):  # the unfinished one ends with its optimizer step
            seconds = dict.fromkeys(PARTS, 0.0)
            ends = [moment for _, moment in step.marks[1:]] + [step.ended]
            for (name, begun), ended in zip(step.marks, ends, strict=True):
                if name is not None:
                    seconds[name] += max(self._timer.elapsed_s(begun, ended), 0.0)
            found.append((sum(seconds.values()), seconds, step.batches))
        if not found:
            return None
        found.sort(key=lambda one: one[0])
        cut = len(found) // 4
        middle = found[cut : len(found) - cut]
        parts = {name: sum(seconds[name] for _, seconds, _ in middle) / len(middle) for name in PARTS}
        return StepTimes(parts, len(found), found[0][0], found[-1][0], found[-1][2])

    def _finish(self, step: _Step, ended: Any) -> None:
        step.ended = ended
        if step.compiled == self._compiled():
            self._steps.append(step)
        self._recorded += 1

    def _read(self, name: str | None) -> None:
        if name is not None and (self._recorded % MEMORY_EVERY == 0 or not self.memory):
            self._reading[name] = self._bytes()

    def _bytes(self) -> int:
        """Return the allocator's bytes in tensors; on a CPU those of this process."""
        if self._device.type != "cpu":
            return torch.accelerator.memory_allocated(self._device)
        return int(PROCESS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if PROCESS.exists() else 0
