"""Insert numbers about casts into a graph: amax, and shares of elements that underflow or overflow.

The op ``fp8_health`` passes them to the executor, see ``sharding/fp8_health.py``. It returns the scale that products
read, so that graphs keep it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from lightning_zero.compile.fx_utils import ops
from lightning_zero.native.ops import Op, Role, register_op
from lightning_zero.profiling.graph_tensors import size_hint

FP8_HEALTH = "fp8_health"
# Elements of a matrix of which shares are computed, so that their kernel takes about as long as its launch.
SAMPLE_NUMEL = 1 << 18

_aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default


def _copy(
    scale: Tensor, amax: Tensor, underflow: Tensor | None, overflow: Tensor | None, shard: Tensor, matrix: int
) -> Tensor:
    return scale.new_empty(scale.shape)


register_op(Op(FP8_HEALTH, shards=4, fake=_copy, role=Role.KERNEL))


def insert_health(
    call: Callable[..., Node], inverse: Node, amax: Node, shares: tuple[Node | None, Node | None], shard: Node, row: int
) -> Node:
    """Pass numbers of one matrix to the executor, and return a copy of ``inverse``.

    Args:
        inverse: the scale that products read.
        amax: largest absolute value, or one for each row or column; float32.
        shares: of underflow and overflow.
        shard: of the layer's weight.
        row: number of the matrix in the layer, see ``MATRICES`` in ``sharding/fp8_health.py``.
    """
    if amax.meta["val"].dim():
        amax = call(_aten.amax.default, amax, [0, 1])
    return call(ops(FP8_HEALTH), inverse, amax, *shares, shard, row)


def insert_shares(call: Callable[..., Node], matrix: Node, scale: Node, dtype: torch.dtype) -> tuple[Node, Node]:
    """Return the share of elements that become zero in ``dtype``, and of those that are infinite or NaN.

    Shares are from 0 to 1, and belong to equally spaced rows. Scales use the whole range, so finite elements do not
    overflow.

    Args:
        scale: by which the cast multiplies elements; a number, or of shape (rows, 1) or (1, columns).
    """
    rows, columns = matrix.meta["val"].shape
    step = max(1, size_hint(rows) * size_hint(columns) // SAMPLE_NUMEL)
    sample = _every(call, matrix, step)
    by_row = scale.meta["val"].dim() == 2 and scale.meta["val"].shape[1] == 1
    scaled = call(_aten.mul.Tensor, call(_cast, sample, torch.float32), _every(call, scale, step) if by_row else scale)
    # Half of the smallest number rounds to even, which is zero.
    format = torch.finfo(dtype)
    small = call(_aten.le.Scalar, call(_aten.abs.default, scaled), format.smallest_normal * format.eps / 2)
    lost = call(_aten.bitwise_and.Tensor, small, call(_aten.ne.Scalar, sample, 0))
    finite = call(_aten.le.Scalar, call(_aten.abs.default, sample), torch.finfo(sample.meta["val"].dtype).max)
    return _share(call, lost), _share(call, call(_aten.logical_not.default, finite))


def _every(call: Callable[..., Node], matrix: Node, step: int) -> Node:
    return matrix if step == 1 else call(_aten.slice.Tensor, matrix, 0, 0, sys.maxsize, step)


def _share(call: Callable[..., Node], mask: Node) -> Node:
    return call(_aten.mean.default, call(_cast, mask, torch.float32))
