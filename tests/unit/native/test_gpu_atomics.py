"""Test the check of atomic operations between GPUs; the driver and NVML are stand-ins."""

import ctypes
from typing import Any

import pytest
import torch

from lightning_zero.native import gpu_atomics as links

GPU = torch.device("cuda", 0)


class Driver:
    """A driver with GPUs a and b, which this process sees, and c."""

    def __init__(self, able: bool = True, fails: str = "") -> None:
        self.able, self.fails = able, fails
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.call(name, *args)

    def call(self, name: str, *args: Any) -> int:
        if name == self.fails:
            return 101
        if name == "cuDeviceGet":
            args[0]._obj.value = args[1] + 40
        elif name == "nvmlDeviceGetHandleByUUID":
            args[1]._obj.value = ord(args[0][-1:])
        elif name == "cuDeviceGetP2PAttribute":
            self.asked.append((args[1], args[2].value, args[3].value))
            args[0]._obj.value = int(self.able)
        elif name == "nvmlDeviceGetP2PStatus":
            self.asked.append((args[2], chr(args[0].value), chr(args[1].value)))
            args[3]._obj.value = 0 if self.able else 4
        return 0


@pytest.fixture(autouse=True)
def _two_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        links, "gpu_uuid", lambda device: "ab"[device.index if isinstance(device, torch.device) else device]
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def use(monkeypatch: pytest.MonkeyPatch, driver: Any) -> Any:
    def load(name: str) -> Any:
        if isinstance(driver, Exception):
            raise driver
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    return driver


def test_the_driver_is_asked_about_each_other_gpu_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = use(monkeypatch, Driver())
    assert links.no_atomics_reason(GPU, ["a", "b", "a"]) == ""
    assert driver.asked == [(3, 40, 41)]


def test_without_atomic_operations_it_names_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Driver(able=False))
    reason = links.no_atomics_reason(GPU, ["b", "a"])
    assert "the GPUs of ranks 1 and 0 have no atomic operations on each other's memory" in reason
    assert "NVLink" in reason


@pytest.mark.parametrize("able", [True, False])
def test_about_a_gpu_that_is_not_seen_the_management_library_is_asked(
    monkeypatch: pytest.MonkeyPatch, able: bool
) -> None:
    driver = use(monkeypatch, Driver(able))
    assert bool(links.no_atomics_reason(GPU, ["a", "c"])) is not able
    assert driver.asked == [(3, "a", "c")]


@pytest.mark.parametrize(
    ("driver", "other"),
    [
        (OSError("libcuda.so.1: cannot open shared object file"), "b"),
        (Driver(fails="cuDeviceGetP2PAttribute"), "b"),
        (Driver(fails="nvmlInit_v2"), "c"),
        (Driver(fails="nvmlDeviceGetP2PStatus"), "c"),
    ],
)
def test_what_cannot_be_told_counts_as_no(monkeypatch: pytest.MonkeyPatch, driver: Any, other: str) -> None:
    use(monkeypatch, driver)
    reason = links.no_atomics_reason(GPU, ["a", other])
    assert "it is unknown if rank 0's GPU can use atomic operations on the memory of rank 1's" in reason
    assert "101" in reason or "cannot open" in reason
