"""Cast float32 rows to fp8, each multiplied by a number that it shares with other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_zero.compat.compiler import lookup_backend
from lightning_zero.compat.tensors import FakeTensorMode

RowCast = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def cast_rows(rows: Tensor, scales: Tensor, numbers: Tensor, out: Tensor) -> None:
    """Write ``rows * scales[numbers]`` to ``out``.

    Args:
        rows: float32, of shape (r, c).
        scales: float32, 1-D.
        numbers: int64, of shape (r,).
        out: of shape (r, c), in fp8. No clamp: rounding may exceed the largest number by half of its last place.
    """
    torch.mul(rows, scales[numbers].unsqueeze(1), out=out)


def compile_cast(*arguments: Tensor) -> RowCast:
    """Return :func:`cast_rows` as one kernel of Inductor, for tensors of these shapes.

    Without it, a GPU reads dtypes for each element, which takes longer than its memory.
    """
    graph = make_fx(
        # Without a type, which torch could not store in its cache.
        lambda rows, scales, numbers, out: out.copy_(rows * scales[numbers].unsqueeze(1)),
        tracing_mode="fake",
    )(*arguments)
    # Inductor's caches need a ShapeEnv to find a graph again, although all sizes are static here.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    inputs = [mode.from_tensor(argument, static_shapes=True) for argument in arguments]
    # autotune_pointwise would benchmark on clones of all weights of this rank.
    compiled: RowCast = lookup_backend("inductor")(graph, inputs, config_patches={"triton.autotune_pointwise": False})
    return compiled
