"""What a device can compute at most in dense matrix products, as its vendor says: what MFU is a share of.

Lightning's own table (``lightning.fabric.utilities.throughput``) is right for A100 and H100 SXM, and has none for a
card that calls itself "NVIDIA H200". For "h200 sxm1" and "h200 nvl1" it holds the numbers with sparsity, which are
twice what dense products can reach, for "h100 nvl" those of a pair of cards, and an L40S is taken for an L4. So these
stand here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PeakFlops", "find_peak_flops"]

TF32 = "tf32"

# 1e12 floating-point operations per second, without sparsity: float32, tf32, and bfloat16 and float16, which are
# equally fast on all of these. From the vendor's data sheets; where one gives numbers with sparsity, halved. The first
# counts whose words are all in the device's name.
CARDS: tuple[tuple[tuple[str, ...], float, float, float], ...] = (
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
    """Floating-point operations per second, and of what, in words."""

    flops: float
    what: str


def find_peak_flops(name: str, dtype: torch.dtype, tf32: bool) -> PeakFlops | None:
    """Of the device that calls itself ``name``, for products in ``dtype``; None where it is not known.

    Args:
        tf32: whether products of float32 may be computed in tf32.
    """
    words = name.lower().replace("-", " ").split()
    for wanted, single, tensor, half in CARDS:
        if all(any(word == part or (part != "l4" and part in word) for word in words) for part in wanted):
            column = {torch.bfloat16: half, torch.float16: half, torch.float32: tensor if tf32 else single}.get(dtype)
            if column is None:
                return None
            kind = TF32 if dtype is torch.float32 and tf32 else str(dtype).removeprefix("torch.")
            return PeakFlops(column * 1e12, f"{name}, dense {kind}: {column:g} TFLOP/s")
    return None
