"""How much more a step takes once compiled calls keep their memory, on a device that takes what the test says."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.compile.uncaptured_memory import LOOKS, Outside, Watched
from lightning_zero.profiling.device_gauges import DeviceMemory

BEFORE, BYTES = 1000, 8  # in tensors between steps; of an input, of an output, and of its gradient


class Device:
    def __init__(self) -> None:
        self.resident = self.peak = self.most = BEFORE
        self.laps = 0

    def lap(self) -> DeviceMemory:
        self.laps += 1
        now = DeviceMemory(10**6, 0, 0, self.peak, self.resident)
        self.peak = self.resident
        return now

    def take(self, keep: int, moment: int = 0) -> None:
        """Bytes that stay, and with them, for a moment, others."""
        self.peak = max(self.peak, self.resident + max(keep, 0) + moment)
        self.most = max(self.most, self.peak)
        self.resident += keep


class Doubled(torch.autograd.Function):
    """Keeps 500 bytes for its backward, in which 400 more are needed for a moment."""

    device: Device

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        Doubled.device.take(500, moment=100)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        Doubled.device.take(0, moment=400)
        Doubled.device.take(-500)
        return 2 * grad


def doubling(device: Device, outside: Outside) -> tuple[Watched, Tensor]:
    """Compiled code, and its weight."""
    Doubled.device = device
    weight = torch.ones(2, requires_grad=True)
    return outside.watched(lambda x, weight: [Doubled.apply(x * weight)], lambda: [weight]), weight


def step(device: Device, outside: Outside, loss_takes: int, calls: int = 1) -> None:
    run, weight = doubling(device, outside)
    for _ in range(calls):
        (out,) = run(torch.ones(2), weight)
        device.take(loss_takes)
        loss = out.sum()
        loss.register_hook(lambda grad: device.take(0, moment=loss_takes))
        loss.backward()
        device.take(-loss_takes)


def watched(loss_takes: int, calls: int = 1) -> tuple[int, int]:
    device = Device()
    outside = Outside(device)  # type: ignore[arg-type]
    outside.begin()
    step(device, outside, loss_takes, calls)
    return outside.end(), device.most - BEFORE


COPIES = 3 * BYTES  # of the input, the output and its gradient


def test_a_loss_outside_lies_beside_what_the_graphs_keep() -> None:
    # Inside 900 at most, outside 700 and 700 for a moment, while 500 are kept.
    assert watched(700) == (900 + 1400 - (500 + 1400) + COPIES, 1900)
    # Inside 900 at most, outside 2 * 50, of which half is still there in the backward of the graph.
    assert watched(50) == (900 + 100 - (900 + 50) + COPIES, 950)


@pytest.mark.parametrize("calls", [1, 4])
def test_where_all_is_compiled_there_are_only_copies_and_once(calls: int) -> None:
    assert watched(0, calls) == (COPIES, 900)


def test_no_other_step_is_looked_at() -> None:
    device = Device()
    outside = Outside(device)  # type: ignore[arg-type]
    step(device, outside, 700)
    outside.begin()
    outside.drop()
    step(device, outside, 700)
    assert (outside.end(), device.laps) == (0, 1)


def test_a_backward_that_comes_after_the_end_is_not_looked_at() -> None:
    device = Device()
    outside = Outside(device)  # type: ignore[arg-type]
    run, weight = doubling(device, outside)
    outside.begin()
    (out,) = run(torch.ones(2), weight)
    outside.end()
    laps = device.laps
    out.sum().backward()
    assert device.laps == laps


def test_what_each_graph_takes_is_looked_at_in_its_first_runs_after_the_very_first() -> None:
    device = Device()
    outside = Outside(device)  # type: ignore[arg-type]
    outside.of_each = True
    run, weight = doubling(device, outside)
    taken, laps = [], []
    for _ in range(LOOKS + 2):
        (out,) = run(torch.ones(2), weight)
        device.take(700)  # a loss, which is none of its
        out.sum().backward()
        device.take(-700)
        taken.append(run.takes())
        laps.append(device.laps)
    assert taken == [0, *[500 + 400] * (LOOKS + 1)]
    assert laps[0] == 0
    assert laps[1:] == [*(4 * (n + 1) for n in range(LOOKS - 1)), *[4 * (LOOKS - 1)] * 2], "each begins and ends twice"


def test_of_two_runs_at_once_each_takes_what_is_its_own() -> None:
    device = Device()
    outside = Outside(device)  # type: ignore[arg-type]
    outside.of_each = True
    run, weight = doubling(device, outside)
    run(torch.ones(2), weight)
    device.resident = BEFORE
    sum(run(torch.ones(2), weight)[0].sum() for _ in range(2)).backward()
    assert run.takes() == 500 + 400
