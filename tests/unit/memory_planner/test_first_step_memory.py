"""Tensors that an eager step saves, on a simulated device."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_zero.memory_planner.first_step_memory import SAVED_SHARE, UNCHECKED_SHARE, FirstStep
from lightning_zero.offload.saved_tensors import SavedTensorOffload, VersionedTensor
from lightning_zero.profiling.device_gauges import DeviceMemory, memory_limit

MIB = 2**20
TOTAL, STAYS = 1000 * MIB, 500 * MIB
ROOM = memory_limit(None, TOTAL) - STAYS


class Saving:
    """A forward that saves 8 MiB after another."""

    def __init__(self, memory: float | None = None, reports: bool = True, stays: int = STAYS) -> None:
        self.made = self.reads = 0
        self.stays = stays
        self.saves: SavedTensorOffload | None = None
        gauge: Any = SimpleNamespace(
            reports_memory=reports,
            is_capturing=False,
            device=torch.device("cpu"),
            read=self._read,
            empty=lambda: None,
            start=lambda anew: None,
        )
        self.step = FirstStep(gauge)
        self.saves = self.step.unmeasured_saves(memory)

    def _read(self) -> DeviceMemory:
        self.reads += 1
        return DeviceMemory(TOTAL, 0, TOTAL, TOTAL, self.stays + self.made - (self.saves.nbytes if self.saves else 0))

    def save(self, count: int) -> list[Any]:
        assert self.saves is not None
        packed = []
        for number in range(count):
            self.made += 8 * MIB
            packed.append(self.saves.pack(torch.full((2 * MIB,), float(number))))
        return packed


def test_nobody_reads_the_device_until_a_quarter_of_its_room_is_taken() -> None:
    saving = Saving()
    before = saving.reads
    quarter = int(UNCHECKED_SHARE * ROOM / (8 * MIB))
    assert all(isinstance(one, VersionedTensor) for one in saving.save(quarter))
    assert saving.reads == before
    assert saving.save(4)
    assert saving.reads > before


def test_what_a_device_has_no_room_for_waits_on_the_host() -> None:
    saving = Saving()
    packed = saving.save(70)
    assert saving.saves is not None
    stayed = saving.made - saving.saves.nbytes
    assert stayed <= SAVED_SHARE * ROOM < stayed + 8 * MIB
    for number, one in enumerate(packed):
        there: Tensor = one.unpack()
        assert there[-1] == number


def test_a_device_that_is_full_already_keeps_nothing() -> None:
    saving = Saving(stays=950 * MIB)
    saving.save(3)
    assert saving.saves is not None
    assert saving.saves.nbytes == 3 * 8 * MIB


def test_a_limit_that_was_set_holds_for_a_later_eager_step_too() -> None:
    saving = Saving(memory=(STAYS + 100 * MIB) / 2**30)
    saving.save(30)
    assert saving.saves is not None
    assert saving.made - saving.saves.nbytes <= 100 * MIB


def test_a_cpu_has_no_room_to_look_after() -> None:
    assert Saving(reports=False).saves is None


def test_state_that_comes_back_from_the_host_finds_room_as_state_that_is_made() -> None:
    saving, given_back = Saving(), []
    saving.step._gauge.empty = lambda: given_back.append(1)  # type: ignore[method-assign]
    for _ in range(2):
        saving.step.optimizer_steps()
    assert len(given_back) == 1
    saving.step.expect_state_from_host()
    for _ in range(2):
        saving.step.optimizer_steps()
    assert len(given_back) == 2
