"""Linear layers in eager code that cast operands to fp8 as the graph pass does, for comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIN_AMAX = 1e-12


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the fp8 numbers in float32, and the factor that undoes their scale."""
    inverse = x.abs().amax().float().clamp(min=MIN_AMAX) * (1 / torch.finfo(dtype).max)
    return (x.float() * inverse.reciprocal()).to(dtype).float(), inverse


def multiply(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
    product = (x[0] @ y[0]) * (x[1] * y[1])
    return (product if bias is None else product + bias).bfloat16()


def turned(x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return x[0].t().contiguous(), x[1]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return multiply(rounded(x, E4M3), turned(rounded(weight, E4M3)), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dy = rounded(grad, E5M2)
        dx = multiply(dy, rounded(weight, E4M3))
        dw = multiply(turned(dy), rounded(x, E4M3)) if ctx.needs_input_grad[1] else None
        return dx, dw, grad.sum(0, keepdim=True).view(-1) if ctx.has_bias else None


class Fp8Linear(nn.Linear):
    """A linear layer in fp8 while ``on`` is True. Casts of weights begin from bfloat16, or from the master weight."""

    on = False
    of_masters = False

    def forward(self, x: Tensor) -> Tensor:
        if not Fp8Linear.on:
            return super().forward(x)
        weight = self.weight if Fp8Linear.of_masters else self.weight.bfloat16()
        bias = None if self.bias is None else self.bias.bfloat16()
        with torch.autocast("cpu", enabled=False):
            rows = x.bfloat16().reshape(-1, x.shape[-1])
            return _Product.apply(rows, weight, bias).view(*x.shape[:-1], -1)


def with_fp8_layers(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Make these linear layers of the model fp8 ones, in place."""
    for name in names:
        layer = model.get_submodule(name)
        assert type(layer) is nn.Linear
        layer.__class__ = Fp8Linear
    return model


__all__ = ["Fp8Linear", "rounded", "with_fp8_layers"]
