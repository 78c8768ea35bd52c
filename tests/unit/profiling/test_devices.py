"""Peak FLOP/s of devices by name."""

import pytest
import torch

from lightning_zero.profiling.devices import find_peak_flops

HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "teraflops"),
    [
        ("NVIDIA H200", HALF, True, 989.4),
        ("NVIDIA H200 NVL", HALF, False, 835.5),
        ("NVIDIA GH200 480GB", torch.float16, False, 989.4),
        ("NVIDIA H100 80GB HBM3", HALF, False, 989.4),
        ("NVIDIA H100 80GB HBM3", SINGLE, True, 494.7),
        ("NVIDIA H100 80GB HBM3", SINGLE, False, 66.9),
        ("NVIDIA H100 PCIe", HALF, False, 756.0),
        ("NVIDIA H100 NVL", HALF, False, 835.5),
        ("NVIDIA A100-SXM4-80GB", HALF, False, 312.0),
        ("NVIDIA A100-PCIE-40GB", SINGLE, True, 156.0),
        ("NVIDIA L40S", HALF, False, 362.0),
        ("NVIDIA L4", HALF, False, 121.0),
    ],
)
def test_the_peak_is_that_of_dense_products(name: str, dtype: torch.dtype, tf32: bool, teraflops: float) -> None:
    peak = find_peak_flops(name, dtype, tf32)
    assert peak is not None
    assert peak.flops == pytest.approx(teraflops * 1e12)
    assert name in peak.what
    assert "dense" in peak.what


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA H1000", "Tesla T4", "NVIDIA GeForce RTX 4090", ""])
def test_an_unknown_device_has_none(name: str) -> None:
    assert find_peak_flops(name, HALF, True) is None


def test_neither_has_an_unknown_dtype() -> None:
    assert find_peak_flops("NVIDIA H200", torch.float64, False) is None
