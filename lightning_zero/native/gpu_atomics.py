"""Support of atomic operations between GPUs, which device barriers need.

GPUs with NVLink have them. Over PCI Express they are usually missing: a barrier would then hang or not synchronize.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

DRIVER, MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, and NVML_P2P_CAPS_INDEX_ATOMICS


def gpu_uuid(device: torch.device | int) -> str:
    """Return the GPU's UUID, which is equal in processes with other device numbers."""
    return str(torch.cuda.get_device_properties(device).uuid)


def no_atomics_reason(device: torch.device, uuids: Sequence[str]) -> str:
    """Return why these GPUs (UUIDs by rank) cannot use device barriers; empty if they can."""
    own = gpu_uuid(device)
    seen = {gpu_uuid(number): number for number in range(torch.cuda.device_count())}
    for rank, uuid in enumerate(uuids):
        if uuid == own:
            continue
        try:
            able = _ask_driver(seen[own], seen[uuid]) if uuid in seen else _ask_management(own, uuid)
        except (OSError, AttributeError, RuntimeError) as error:
            return (
                f"it is unknown if rank {uuids.index(own)}'s GPU can use atomic operations on the memory of "
                f"rank {rank}'s ({error})"
            )
        if not able:
            return (
                f"the GPUs of ranks {uuids.index(own)} and {rank} have no atomic operations on each other's memory, as "
                "is usual without NVLink"
            )
    return ""


def _ask_driver(one: int, other: int) -> bool:
    driver = ctypes.CDLL(DRIVER)
    devices = []
    for number in (one, other):
        devices.append(ctypes.c_int())
        _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(devices[-1]), number))
    able = ctypes.c_int()
    _check(
        "cuDeviceGetP2PAttribute",
        driver.cuDeviceGetP2PAttribute(ctypes.byref(able), NATIVE_ATOMICS, devices[0], devices[1]),
    )
    return bool(able.value)


def _ask_management(one: str, other: str) -> bool:
    """Query GPUs that this process does not see, as if CUDA_VISIBLE_DEVICES gives each process its own."""
    nvml = ctypes.CDLL(MANAGEMENT)
    _check("nvmlInit", nvml.nvmlInit_v2())
    try:
        handles = []
        for uuid in (one, other):
            handles.append(ctypes.c_void_p())
            found = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handles[-1]))
            _check("nvmlDeviceGetHandleByUUID", found)
        status = ctypes.c_int()
        _check(
            "nvmlDeviceGetP2PStatus",
            nvml.nvmlDeviceGetP2PStatus(handles[0], handles[1], NATIVE_ATOMICS, ctypes.byref(status)),
        )
        return status.value == 0
    finally:
        nvml.nvmlShutdown()


def _check(function: str, result: int) -> None:
    if result != 0:
        raise RuntimeError(f"{function} returned {result}")
