"""Linear layers in eager code that cast operands to fp8 as the graph pass does, for comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIN_AMAX = 1e-12


def rounded(x: Tensor, dtype: torch.dtype, contracted: int = 1) -> tuple[Tensor, Tensor]:
    """Return the fp8 numbers in float32, and the factors that undo their scales.

    Args:
        contracted: dimension that shares a scale if ``Fp8Linear.by_row``; otherwise the whole matrix does.
    """
    amax = x.abs().amax(contracted, keepdim=True) if Fp8Linear.by_row else x.abs().amax()
    inverse = amax.float().clamp(min=MIN_AMAX) * (1 / torch.finfo(dtype).max)
    return (x.float() * inverse.reciprocal()).to(dtype).float(), inverse


def multiply(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
    product = (x[0] @ y[0]) * (x[1] * y[1])
    return (product if bias is None else product + bias).bfloat16()


def turned(x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return x[0].t().contiguous(), x[1].t()


def health(x: Tensor, dtype: torch.dtype, contracted: tuple[int, ...]) -> dict[str, float]:
    """Return the largest absolute value, and the largest shares of the matrix's casts that underflow or overflow."""
    casts = [rounded(x, dtype, dim)[0] for dim in contracted]
    return {
        "amax": x.abs().max().item(),
        "underflow": max(((x != 0) & (cast == 0)).float().mean().item() for cast in casts),
        "overflow": (~x.isfinite()).float().mean().item(),
    }


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Fp8Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.layer = bias is not None, layer
        return multiply(rounded(x, E4M3), turned(rounded(weight, E4M3)), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.layer.note("output_gradient", grad, E5M2, (0, 1) if ctx.needs_input_grad[1] else (1,))
        dx = multiply(rounded(grad, E5M2), rounded(weight, E4M3, 0))
        dw = multiply(turned(rounded(grad, E5M2, 0)), rounded(x, E4M3, 0)) if ctx.needs_input_grad[1] else None
        return dx, dw, grad.sum(0, keepdim=True).view(-1) if ctx.has_bias else None, None


class Fp8Linear(nn.Linear):
    """A linear layer in fp8 while ``on`` is True. Casts of weights begin from bfloat16, or from the master weight.

    With ``by_row``, each row of the left and each column of the right operand has a scale.
    """

    on = False
    of_masters = False
    by_row = False
    health: dict[str, float]

    def note(self, matrix: str, x: Tensor, dtype: torch.dtype, contracted: tuple[int, ...]) -> None:
        for name, number in health(x, dtype, contracted).items():
            key = f"{matrix}_{name}"
            self.health[key] = max(self.health.get(key, number), number)

    def forward(self, x: Tensor) -> Tensor:
        if not Fp8Linear.on:
            return super().forward(x)
        weight = self.weight if self.of_masters else self.weight.bfloat16()
        bias = None if self.bias is None else self.bias.bfloat16()
        with torch.autocast("cpu", enabled=False):
            rows = x.bfloat16().reshape(-1, x.shape[-1])
            if torch.is_grad_enabled():
                self.note("input", rows.detach(), E4M3, (0, 1) if weight.requires_grad else (1,))
                self.note("weight", weight.detach(), E4M3, (0, 1))
            return _Product.apply(rows, weight, bias, self).view(*x.shape[:-1], -1)


def with_fp8_layers(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Make these linear layers of the model fp8 ones, in place."""
    for name in names:
        layer = model.get_submodule(name)
        assert type(layer) is nn.Linear
        layer.__class__ = Fp8Linear
        layer.health = {}
    return model


__all__ = ["Fp8Linear", "rounded", "with_fp8_layers"]
