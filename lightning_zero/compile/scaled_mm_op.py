"""The op of fp8 products: both operands have contiguous rows, and the second one is transposed.

``torch._scaled_mm`` needs contiguous columns on the right. Inductor does not promise that for a copy: without a
constraint a copy gets the strides of what it reads. The tag ``needs_fixed_stride_order`` is that constraint. On a CPU
the op computes the same product in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library
from torch.utils.flop_counter import register_flop_formula

from lightning_zero.compat.tensors import scaled_mm

_NAMESPACE = "lightning_zero_fp8"
_LIBRARY = Library(_NAMESPACE, "DEF")
_LIBRARY.define(
    "scaled_mm(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, Tensor? bias, ScalarType dtype, "
    "bool fast) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
SCALED_MM = torch.ops.lightning_zero_fp8.scaled_mm.default


def multiply(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Return ``(left * left_scale) @ (right * right_scale).T + bias``, of shape (m, n).

    Args:
        left: fp8, of shape (m, k).
        right: fp8, of shape (n, k).
        left_scale, right_scale: float32; both numbers, or vectors with one number for each row, in any shape.
        bias: of shape (n,).
        dtype: of the result.
        fast: accumulate in the tensor cores' registers only; ignored on a CPU.
    """
    left, right = left.contiguous(), right.contiguous()
    if left_scale.numel() > 1 or right_scale.numel() > 1:
        left_scale, right_scale = left_scale.reshape(-1, 1), right_scale.reshape(1, -1)
    if left.device.type != "cpu":
        return scaled_mm(left, right.t(), left_scale, right_scale, bias, None, dtype, fast)
    product = (left.float() @ right.float().t()) * (left_scale * right_scale)
    return (product if bias is None else product + bias).to(dtype)


def _fake(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=dtype)


_LIBRARY.impl("scaled_mm", lambda *operands: multiply(*operands), "CompositeExplicitAutograd")
torch.library.register_fake(f"{_NAMESPACE}::scaled_mm", _fake, lib=_LIBRARY)


@register_flop_formula(torch.ops.lightning_zero_fp8.scaled_mm)
def _flops(left_shape: list[int], right_shape: list[int], *_: object, **__: object) -> int:
    return 2 * left_shape[0] * left_shape[1] * right_shape[0]
