"""What a device has left, next to what training and others take."""

import pytest
import torch

from lightning_zero.profiling.headroom import DeviceMemory, MemoryGauge


@pytest.mark.parametrize(
    ("others", "reserved", "spare"), [(0, 0, 90), (10, 50, 30), (0, 89, 1), (0, 90, 0), (60, 60, 0)]
)
def test_a_margin_of_the_whole_device_is_left(others: int, reserved: int, spare: int) -> None:
    assert DeviceMemory(100, others, reserved, allocated=1, resident=1).spare == spare


def test_a_cpu_does_not_tell() -> None:
    assert not MemoryGauge(torch.device("cpu")).exists
