"""Test host memory: its size, its NUMA node, and its errors."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_zero.errors import HostMemoryError
from lightning_zero.offload import pinned_memory as memory
from lightning_zero.offload.pinned_memory import HostMemory, cpus_near, free_bytes, parse_cpu_list

GPU = torch.device("cuda", 0)


def test_on_a_cpu_it_is_plain_memory() -> None:
    host = HostMemory(torch.device("cpu"))
    made = host.empty(7, torch.bfloat16)
    assert (made.shape, made.dtype, made.device.type) == ((7,), torch.bfloat16, "cpu")
    assert host.holds(made)
    assert not HostMemory(GPU).holds(made)


def test_the_smaller_of_what_host_and_container_have_left_counts(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:     500 kB\n")
    assert free_bytes(tmp_path, tmp_path) == 500 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300000\n")
    (tmp_path / "memory.stat").write_text("anon 200000\ninactive_file 50000\n")
    assert free_bytes(tmp_path, tmp_path) == 500 * 1024
    (tmp_path / "memory.max").write_text("400000\n")
    assert free_bytes(tmp_path, tmp_path) == 150000
    assert free_bytes(tmp_path / "none", tmp_path / "none") is None


def test_too_little_memory_is_an_error_with_bytes_and_what_to_do() -> None:
    with patch.object(memory, "free_bytes", lambda: 2**30), pytest.raises(HostMemoryError) as caught:
        HostMemory(GPU).empty(2**30, torch.float32)
    assert "4.00 GiB (4,294,967,296 bytes)" in str(caught.value)
    assert "1.00 GiB (1,073,741,824 bytes) available" in str(caught.value)
    assert "Leave out offload=" in str(caught.value)


class Driver:
    """Emulate CUDA's registration of host memory."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.registered, self.released, self.flags = refuses, [], [], []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered.append((address, nbytes))
        self.flags.append(flags)
        return 2 if self.refuses else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.released.append(address)
        return 0

    def check(self, code: int) -> None:
        if code:
            raise RuntimeError("out of memory")

    def instead(self):
        return patch.multiple(
            torch.cuda,
            cudart=lambda: self,
            check_error=self.check,
            device=lambda device: memory.suppress(),
            synchronize=lambda *device: self.released.append("waited"),
        )


def pinned(driver: Driver, numel: int) -> torch.Tensor:
    with patch.object(memory, "cpus_near", lambda device: frozenset()), patch.object(memory, "TOUCH_BYTES", 4096):
        return HostMemory(GPU).empty(numel, torch.float32)


def test_memory_is_registered_as_long_as_somebody_holds_it() -> None:
    driver = Driver()
    with driver.instead():
        made = pinned(driver, 3000)
        assert driver.registered == [(made.data_ptr(), 12000)]
        assert not made.any()
        part = made[5:].fill_(2)
        del made
        assert driver.released == []
        assert part.sum() == 2 * 2995
        address = part.data_ptr() - 20
        del part
    assert driver.released == ["waited", address]


def test_memory_that_a_device_sees_is_registered_for_that_and_held_by_either_view() -> None:
    driver = Driver()

    def as_tensor(seen: Any, device: torch.device) -> torch.Tensor:
        (nbytes,), (address, read_only) = seen.__cuda_array_interface__["shape"], seen.__cuda_array_interface__["data"]
        assert (device, read_only, seen.__cuda_array_interface__["typestr"]) == (GPU, False, "|u1")
        buffer = (ctypes.c_char * nbytes).from_address(address)
        buffer.held = seen
        return torch.frombuffer(buffer, dtype=torch.uint8)

    near = patch.object(memory, "cpus_near", lambda device: frozenset())
    with driver.instead(), near, patch.object(torch, "as_tensor", as_tensor):
        seen, host = HostMemory(GPU).mapped(3000, torch.float32)
        assert driver.registered == [(seen.data_ptr(), 12000)]
        assert driver.flags == [2]  # cudaHostRegisterMapped
        seen[7:] = 3
        assert host.tolist() == [0.0] * 7 + [3.0] * 2993
        del host
        assert driver.released == []
        address = seen.data_ptr()
        del seen
    assert driver.released == ["waited", address]
    both = HostMemory(torch.device("cpu")).mapped(5, torch.bfloat16)
    assert [(view.dtype, view.tolist()) for view in both] == [(torch.bfloat16, [0.0] * 5)] * 2
    assert both[0].data_ptr() == both[1].data_ptr()


def test_memory_that_cannot_be_pinned_is_an_error_with_bytes_and_what_to_do() -> None:
    driver = Driver(refuses=True)
    with driver.instead(), pytest.raises(HostMemoryError) as caught:
        pinned(driver, 1 << 18)
    assert "1.0 MiB (1,048,576 bytes)" in str(caught.value)
    assert "could not be pinned" in str(caught.value)
    assert "ulimit -l" in str(caught.value)
    assert driver.released == []


def test_cpus_near_a_gpu_are_those_of_its_node(tmp_path: Path) -> None:
    place, node = tmp_path / "bus/pci/devices/0000:1b:00.0", tmp_path / "devices/system/node/node1"
    place.mkdir(parents=True), node.mkdir(parents=True)
    (node / "cpulist").write_text("4-6,12\n")
    known = SimpleNamespace(pci_domain_id=0, pci_bus_id=27, pci_device_id=0)
    with (
        patch.object(torch.cuda, "get_device_properties", lambda device: known),
        patch("os.sched_getaffinity", lambda process: {5, 6, 7, 12}),
    ):
        assert cpus_near(GPU, tmp_path) == frozenset()
        (place / "numa_node").write_text("-1\n")
        assert cpus_near(GPU, tmp_path) == frozenset()
        (place / "numa_node").write_text("1\n")
        assert cpus_near(GPU, tmp_path) == {5, 6, 12}
    assert cpus_near(torch.device("cpu"), tmp_path) == frozenset()
    assert parse_cpu_list("0-2,8") == {0, 1, 2, 8}
    assert parse_cpu_list("\n") == frozenset()
