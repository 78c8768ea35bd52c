"""The op of fp8 products."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_zero.compile import scaled_mm_op
from lightning_zero.compile.scaled_mm_op import SCALED_MM

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """As in backward: both operands are transposed copies of fp8 casts."""
    left, right = ((value * 2).to(FP8).t().clone(memory_format=torch.contiguous_format) for value in (grad, x))
    half = torch.full((), 0.5, device=x.device)
    return SCALED_MM(left, right, half, half, None, BF16, False)


def test_it_multiplies_scaled_operands_and_adds_the_bias() -> None:
    left, right, bias = torch.randn(6, 16).to(FP8), torch.randn(4, 16).to(FP8), torch.randn(4, dtype=BF16)
    found = SCALED_MM(left, right, torch.tensor(2.0), torch.tensor(0.25), bias, BF16, True)
    expected = ((left.float() * 2) @ (right.float() * 0.25).t() + bias).to(BF16)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert found.dtype is BF16


def test_generated_code_passes_operands_with_contiguous_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies without a constraint get the strides of their source, which scaled products on GPUs reject."""
    layouts, multiply = [], scaled_mm_op.multiply

    def recorded(left: Tensor, right: Tensor, *rest: Any) -> Tensor:
        layouts.append((left.is_contiguous(), right.is_contiguous()))
        return multiply(left, right, *rest)

    monkeypatch.setattr(scaled_mm_op, "multiply", recorded)
    x, grad = torch.randn(32, 48), torch.randn(32, 64)
    found = torch.compile(weight_gradient)(x, grad)
    assert layouts == [(True, True)]
    torch.testing.assert_close(found, weight_gradient(x, grad))


def test_its_operations_are_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        weight_gradient(torch.randn(32, 48), torch.randn(32, 64))
    assert counter.get_total_flops() == 2 * 32 * 48 * 64
