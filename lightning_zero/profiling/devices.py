"""GPUs as their vendors state them: memory, dense products, bandwidths; and how much of that is reached."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_zero.profiling.cost import DeviceSpeed

__all__ = ["DEVICES", "Device", "find_device"]

GIB = 2**30

# Shares of what is stated that trainings reach: measured on H200s, where products of bfloat16 ran at 640 to 790 of 989
# TFLOP/s, elementwise kernels at 4.2 of 4.8 TB/s, and all-gathers inside a host at 305 of 450 GB/s.
PRODUCTS, MEMORY, LINKS = 0.7, 0.87, 0.68
LAUNCH_S = 2e-6  # between kernels of a replayed graph
ACROSS = 50e9  # bytes per second from other hosts: one network card of 400 Gbit/s for each GPU


@dataclass(frozen=True)
class Device:
    """One GPU, by data sheet.

    Attributes:
        name: by which users ask for it.
        memory: bytes that its driver reports.
        half: floating-point operations per second in dense products of bfloat16 or float16, without sparsity.
        single: likewise of float32, without tf32.
        bytes_per_s: of its memory.
        inside: bytes per second that it receives from other GPUs of its host, while it sends as many.
        across: likewise from other hosts.
        context: bytes that the driver, CUDA's context, cuBLAS and NCCL take of each device, which no allocator sees.
    """

    name: str
    memory: float
    half: float
    single: float
    bytes_per_s: float
    inside: float
    across: float = ACROSS
    context: float = 2.0 * GIB  # measured: 2.06 and 2.07 on an H200 with NCCL

    @property
    def speed(self) -> DeviceSpeed:
        """As far as it is reached."""
        half, single = self.half * PRODUCTS, self.single * PRODUCTS
        flops = {torch.bfloat16: half, torch.float16: half, torch.float32: single, torch.float64: single / 2}
        return DeviceSpeed(flops, self.bytes_per_s * MEMORY, LAUNCH_S)


DEVICES = (
    Device("H200", 139.8 * GIB, 989.4e12, 66.9e12, 4.8e12, 450e9),
    Device("H200-NVL", 139.8 * GIB, 835.5e12, 60.0e12, 4.8e12, 450e9),
    Device("GH200", 94.5 * GIB, 989.4e12, 66.9e12, 4.0e12, 450e9),
    Device("H100", 79.2 * GIB, 989.4e12, 66.9e12, 3.35e12, 450e9),
    Device("H100-NVL", 93.1 * GIB, 835.5e12, 60.0e12, 3.9e12, 300e9),
    Device("H100-PCIe", 79.2 * GIB, 756.0e12, 51.2e12, 2.0e12, 55e9),
    Device("B200", 178.3 * GIB, 2250e12, 75e12, 8.0e12, 900e9),
    Device("A100", 79.2 * GIB, 312e12, 19.5e12, 2.04e12, 300e9),
    Device("A100-40GB", 39.4 * GIB, 312e12, 19.5e12, 1.56e12, 300e9),
    Device("L40S", 44.4 * GIB, 362e12, 91.6e12, 0.86e12, 28e9),
    Device("L4", 22.0 * GIB, 121e12, 30.3e12, 0.30e12, 28e9),
    Device("RTX-4090", 23.5 * GIB, 165.2e12, 82.6e12, 1.01e12, 28e9),
    Device("RTX-3090", 23.5 * GIB, 71e12, 35.6e12, 0.94e12, 28e9),
)


def find_device(name: str) -> Device:
    """Raises ``ValueError`` for one that is not in the table."""
    for device in DEVICES:
        if device.name.lower() == name.lower().replace(" ", "-"):
            return device
    known = ", ".join(device.name for device in DEVICES)
    raise ValueError(
        f"device={name!r} is none of {known}. Pass one of these, or lightning_zero.Device(...) with its data sheet."
    )
