"""How fast a device copies to its host and back, both at once."""

from __future__ import annotations

import torch

__all__ = ["measure_host_link"]

SIZE = 64 << 20  # bytes of a copy
REPETITIONS = 4


def measure_host_link(device: torch.device) -> float | None:
    """Bytes per second in each direction, between pinned memory and a CUDA device, in some hundredths of a second; None
    for other devices, and where the host pins no memory. Draws no random numbers, and gives its memory back."""
    if device.type != "cuda":
        return None
    try:
        there, back = (torch.empty(SIZE, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    except RuntimeError:  # a limit on pinned memory: whoever offloads is told by name
        return None
    sent, came = (torch.empty(SIZE, dtype=torch.uint8, device=device) for _ in range(2))
    lanes = [torch.cuda.Stream(device) for _ in range(2)]
    current = torch.cuda.current_stream(device)
    found = []
    for _ in range(REPETITIONS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(current)
        for lane, (target, source) in zip(lanes, ((sent, there), (back, came)), strict=True):
            lane.wait_stream(current)
            with torch.cuda.stream(lane):
                target.copy_(source, non_blocking=True)
            current.wait_stream(lane)
        ended.record(current)
        ended.synchronize()
        found.append(SIZE / (begun.elapsed_time(ended) * 1e-3))
    return max(found[1:])  # the first one wakes the device up
