"""Readings of a device's memory."""

import pytest
import torch

from lightning_zero.profiling.device_gauges import DeviceMemory, MemoryGauge, memory_limit


def test_what_is_here_is_all_but_what_the_allocator_can_give_back() -> None:
    memory = DeviceMemory(100, others=10, reserved=60, allocated=50, allocated_now=20, cached=30)
    assert (memory.here, memory.taken) == (30, 70)


@pytest.mark.parametrize(("memory", "limit"), [(None, 90), ("auto", 90), (50 / 2**30, 50), (200 / 2**30, 100)])
def test_a_limit_is_the_number_or_all_but_a_margin(memory: float | str | None, limit: float) -> None:
    assert memory_limit(memory, 100) == pytest.approx(limit)


def test_a_cpu_does_not_tell() -> None:
    assert not MemoryGauge(torch.device("cpu")).reports_memory
