"""Check that a device has fp8 products."""

from __future__ import annotations

import torch

from lightning_zero.errors import UnsupportedError

MIN_CAPABILITY = 8, 9  # of torch._scaled_mm with one scale per matrix
_DEVICES = "Ada (L4, L40S, RTX 4090), Hopper (H100, H200) and newer NVIDIA GPUs"


def check_fp8_device(device: torch.device) -> None:
    """Raise unless the device multiplies fp8 matrices; a CPU computes the same numbers in float32.

    Raises:
        UnsupportedError: The device has no fp8 products.
    """
    if device.type == "cpu":
        return
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability >= MIN_CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)} has compute capability {'.'.join(map(str, capability))}"
    else:
        found = f"this is {'an AMD GPU' if device.type == 'cuda' else device.type}"
    raise UnsupportedError(
        f"linear_dtype='fp8' needs a GPU with fp8 products: {_DEVICES}, from compute capability "
        f"{'.'.join(map(str, MIN_CAPABILITY))}. But {found}. Leave linear_dtype out."
    )
