"""What a device has left, next to what training and others take."""

import pytest
import torch

from lightning_zero.profiling.device_gauges import DeviceMemory, MemoryGauge, memory_limit


def test_what_is_here_is_all_but_what_the_allocator_can_give_back() -> None:
    memory = DeviceMemory(100, others=10, reserved=60, allocated=50, resident=20, cached=30)
    assert (memory.here, memory.taken) == (30, 70)


@pytest.mark.parametrize(("memory", "limit"), [(None, 90), ("auto", 90), (50 / 2**30, 50), (200 / 2**30, 100)])
def test_a_limit_is_the_number_or_all_but_a_margin(memory: float | str | None, limit: float) -> None:
    assert memory_limit(memory, 100) == pytest.approx(limit)


class Counted:
    """Torch's statistics of an allocator that holds so much, with peaks that it resets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        for name in ("memory_stats", "get_memory_info", "reset_peak_memory_stats", "empty_cache"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        kinds = ("reserved", "allocated")
        return {f"{kind}_bytes.all.{what}": getattr(self, at) for kind in kinds for what, at in AT}

    def get_memory_info(self, device: torch.device) -> tuple[int, int]:
        return 900 - self.now, 1000

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.now

    def empty_cache(self) -> None:
        pass


AT = (("current", "now"), ("peak", "peak"))


def test_laps_have_peaks_of_their_own_which_count_until_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, gauge = Counted(monkeypatch), MemoryGauge(torch.device("cuda", 0))
    gauge.start()
    allocator.take(300)
    allocator.take(-200)
    assert (gauge.lap().allocated, gauge.lap().allocated) == (300, 100)
    allocator.take(50)
    assert (gauge.lap().allocated, gauge.read().allocated, gauge.read().taken) == (150, 300, 400)
    assert gauge.read().resident == 150
    gauge.start(anew=True)
    assert (gauge.read().allocated, gauge.read().taken) == (150, 250)


def test_a_cpu_does_not_tell() -> None:
    assert not MemoryGauge(torch.device("cpu")).reports_memory
