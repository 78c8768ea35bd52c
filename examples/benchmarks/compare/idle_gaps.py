"""Find the idle time of a device in a step from a trace of torch's profiler: between which kernels, and the host's
calls meanwhile. Also measure the time in which only transfers between ranks, and waits for them, run.

A profiler slows the host down but not the device, so gaps in which the device waits for the host look longer than they
are. :meth:`compare.timing.Clock.leads` says if the host is late without a profiler.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Gap", "Steps", "describe", "read", "summarise"]

COMPUTES, COPIES = ("kernel",), ("gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
STEP = "ProfilerStep#"
# Kernels of csrc that transfer data between ranks, or wait for it; those of NCCL have a common prefix.
MEETINGS = frozenset([
    "announce_epoch", "announce_parts", "announce_send", "begin_barrier_step", "hold_stream", "rank_barrier",
    "reserve_link", "wait_for_epoch", "wait_for_parts",
])  # fmt: skip
SHORTEST_US = 2.0  # gaps between kernels of one CUDA graph are as long
NAME_CHARACTERS = 48  # of a kernel's name, at most


@dataclass
class Gap:
    """The idle time between two kernels.

    Attributes:
        after, before: names of the kernels.
        us: microseconds per step, on average.
        times: number of such gaps per step.
        calls: microseconds of the host's calls into the driver meanwhile, by name.
    """

    after: str
    before: str
    us: float = 0.0
    times: float = 0.0
    calls: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class Steps:
    """The steps of a trace. All times are in microseconds per step, on average.

    Attributes:
        steps: number of steps in the trace.
        us: from the first kernel of a step to that of the next.
        computing: a kernel runs that is none of communication.
        meeting: only kernels of communication run, and copies: communication that is not hidden.
        copying: only copies run.
        idle: nothing runs.
        gaps: the longest are first.
        calls: time of the host's calls into the driver, by name.
        launched: number of these calls, by name.
    """

    steps: int
    us: float
    computing: float
    meeting: float
    copying: float
    idle: float
    gaps: tuple[Gap, ...]
    calls: dict[str, float]
    launched: dict[str, float]

    def lines(self, most: int = 12) -> list[str]:
        """Return text for people, with at most ``most`` gaps and calls."""
        shown = [
            f"{self.us / 1e3:.2f} ms per step with a profiler ({self.steps} steps): "
            f"kernels {self.computing / 1e3:.2f}, ranks' transfers and waits alone {self.meeting / 1e3:.2f}, "
            f"copies alone {self.copying / 1e3:.2f}, idle {self.idle / 1e3:.2f}",
        ]
        for gap in self.gaps[:most]:
            host = sorted(gap.calls.items(), key=lambda call: -call[1])[:3]
            meanwhile = ", ".join(f"{name} {us:.0f}" for name, us in host) or "no call into the driver"
            names = f"{gap.after[:NAME_CHARACTERS]} -> {gap.before[:NAME_CHARACTERS]}"
            shown.append(f"  idle {gap.us:6.0f} us in {gap.times:.1f} gaps: {names} ({meanwhile})")
        calls = sorted(self.calls.items(), key=lambda call: -call[1])[:most]
        shown += [f"  host  {us:6.0f} us in {self.launched[name]:.1f} calls of {name}" for name, us in calls]
        return shown


def read(trace: Path) -> Steps | None:
    """Summarize a Chrome trace; None if it has no kernels in at least two steps."""
    return summarise(json.loads(trace.read_text())["traceEvents"])


def describe(trace: Path) -> list[str]:
    """Return text for people about a Chrome trace."""
    found = read(trace)
    return found.lines() if found else ["a trace without kernels"]


def summarise(events: Iterable[dict[str, Any]]) -> Steps | None:
    """Summarize the events of a trace; see :func:`read`."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    marks = sorted(e["ts"] for e in spans if e.get("name", "").startswith(STEP) and e.get("cat") == "user_annotation")
    device = sorted((e for e in spans if e.get("cat") in COMPUTES + COPIES), key=lambda event: event["ts"])
    host = [event for event in spans if event.get("cat") in CALLS]
    # The device is late by the same time in each step, so the host's marks measure its steps, too.
    if len(marks) < 2 or not device:
        return None
    begin, end, steps = marks[0], marks[-1], len(marks) - 1
    device = [event for event in device if begin <= event["ts"] < end]
    host = [event for event in host if begin <= event["ts"] < end]
    if not device:
        return None
    kernels = [event for event in device if event["cat"] in COMPUTES]
    computing = _length(_union(event for event in kernels if not _is_meeting(event["name"])))
    any_kernel, running = _length(_union(kernels)), _length(_union(device))
    total = end - begin
    calls: dict[str, float] = defaultdict(float)
    launched: dict[str, float] = defaultdict(float)
    for event in host:
        calls[event["name"]] += event["dur"] / steps
        launched[event["name"]] += 1 / steps
    gaps = sorted(_gaps(device, host, steps), key=lambda gap: -gap.us)
    return Steps(
        steps,
        total / steps,
        computing / steps,
        (any_kernel - computing) / steps,
        (running - any_kernel) / steps,
        (total - running) / steps,
        tuple(gaps),
        dict(calls),
        dict(launched),
    )


def _is_meeting(kernel: str) -> bool:
    return kernel in MEETINGS or kernel.startswith("nccl")


def _union(events: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return the intervals in which an event runs. The events are sorted by their begin."""
    found: list[tuple[float, float]] = []
    for event in events:
        begin, end = event["ts"], event["ts"] + event["dur"]
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)


def _gaps(device: Sequence[dict[str, Any]], host: Sequence[dict[str, Any]], steps: int) -> Iterable[Gap]:
    found: dict[tuple[str, str], Gap] = {}
    last = device[0]
    for event in device[1:]:
        begin = last["ts"] + last["dur"]
        if event["ts"] - begin >= SHORTEST_US:
            names = last["name"], event["name"]
            gap = found.setdefault(names, Gap(*names))
            gap.us += (event["ts"] - begin) / steps
            gap.times += 1 / steps
            for call in host:
                inside = min(event["ts"], call["ts"] + call["dur"]) - max(begin, call["ts"])
                if inside > 0:
                    gap.calls[call["name"]] += inside / steps
        if event["ts"] + event["dur"] > begin:
            last = event
    return found.values()
