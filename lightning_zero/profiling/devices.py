"""Data sheets of GPUs, the shares of them that trainings reach, and the peak FLOP/s for MFU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_zero.profiling.node_costs import DeviceSpeed

GIB = 2**30

# Shares of the data sheet that trainings reach. Measured on H200s: products of bfloat16 at 640 to 790 of 989 TFLOP/s,
# elementwise kernels at 4.2 of 4.8 TB/s, and all-gathers within a host at 305 of 450 GB/s.
PRODUCTS, MEMORY, LINKS = 0.7, 0.87, 0.68
LAUNCH_S = 2e-6  # between kernels of a CUDA graph
ACROSS = 50e9  # bytes per second from other hosts: a 400 Gbit/s network card for each GPU


@dataclass(frozen=True)
class Device:
    """Data sheet of one GPU.

    Attributes:
        name: Name for the argument ``device`` of :func:`plan`.
        memory: Bytes that its driver reports.
        half: FLOP/s in dense products of bfloat16 or float16, without sparsity.
        single: FLOP/s in dense products of float32, without tf32.
        bytes_per_s: Bandwidth of its memory.
        inside: Bytes per second that it receives from GPUs of its host while it sends as many.
        across: Bytes per second that it receives from other hosts while it sends as many.
        context: Bytes of the driver, CUDA's context, cuBLAS and NCCL, which the allocator does not see.
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
        """Return the speed that trainings reach."""
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
    """Return the device of a name. Raises ``ValueError`` for an unknown one."""
    for device in DEVICES:
        if device.name.lower() == name.lower().replace(" ", "-"):
            return device
    known = ", ".join(device.name for device in DEVICES)
    raise ValueError(
        f"device={name!r} is none of {known}. Pass one of these, or lightning_zero.Device(...) with its data sheet."
    )


# For MFU: words in a device's name, and TFLOP/s in dense products of float32, tf32, and bfloat16 or float16, without
# sparsity. The first row whose words are all in the name applies. Lightning's table
# (``lightning.fabric.utilities.throughput``) is not used: it lacks "NVIDIA H200", has the numbers with sparsity for
# other H200s, those of a pair of cards for "h100 nvl", and takes an L40S for an L4.
PEAKS: tuple[tuple[tuple[str, ...], float, float, float], ...] = (
    (("h200", "nvl"), 60.0, 417.5, 835.5),
    (("h200",), 66.9, 494.7, 989.4),
    (("gh200",), 66.9, 494.7, 989.4),
    (("h100", "nvl"), 60.0, 417.5, 835.5),
    (("h100", "pcie"), 51.2, 378.0, 756.0),
    (("h100", "hbm3"), 66.9, 494.7, 989.4),
    (("h100", "sxm"), 66.9, 494.7, 989.4),
    (("a100",), 19.5, 156.0, 312.0),
    (("l40s",), 91.6, 183.0, 362.0),
    (("l4",), 30.3, 60.0, 121.0),
)


@dataclass(frozen=True)
class PeakFlops:
    """Peak FLOP/s of a device, and their description."""

    flops: float
    what: str


def find_peak_flops(name: str, dtype: torch.dtype, tf32: bool) -> PeakFlops | None:
    """Return the peak of the device called ``name`` for products in ``dtype``; None if it is unknown."""
    words = name.lower().replace("-", " ").split()
    for wanted, single, tensor, half in PEAKS:
        if all(any(word == part or (part != "l4" and part in word) for word in words) for part in wanted):
            column = {torch.bfloat16: half, torch.float16: half, torch.float32: tensor if tf32 else single}.get(dtype)
            if column is None:
                return None
            kind = "tf32" if dtype is torch.float32 and tf32 else str(dtype).removeprefix("torch.")
            return PeakFlops(column * 1e12, f"{name}, dense {kind}: {column:g} TFLOP/s")
    return None
