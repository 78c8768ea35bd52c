"""Our ops: what torch, the passes and the model of costs must know of each besides its schema and its kernel.

Those stand side by side in ``csrc/ops.cpp``. A new op is a row there and a row here; ``tests/native/test_ops.py``
compares the two tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.ops import OpOverload

__all__ = ["NAMESPACE", "OPS", "Op", "Role", "op_of"]

NAMESPACE = "lightning_zero"


class Role(Enum):
    """What an op does in a graph that passes have gone over."""

    START = auto()  # launches gathers
    REDUCE = auto()  # hands gradients over
    OTHER = auto()


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        name: below the namespace.
        shards: position of the argument that is the parameter's shard, or a list of them.
        fake: what it returns where there are no values.
        role: in a graph.
        has_effect: it does something besides what it returns: without this a graph would lose it where nobody reads
            its result.
        copies_grads: it costs a copy of its first argument into a bucket; otherwise its launch.
    """

    name: str
    shards: int
    fake: Callable[..., Tensor | None]
    role: Role = Role.OTHER
    has_effect: bool = False
    copies_grads: bool = False

    @property
    def overload(self) -> OpOverload:
        """As it stands in graphs; after :func:`~lightning_zero.native.load.load`."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default


def _whole(shard: Tensor, shape: list[int], dtype: torch.dtype, resident: Tensor | None = None) -> Tensor:
    return shard.new_empty(shape, dtype=dtype)


def _group(shards: list[Tensor], dtype: torch.dtype, numel: int) -> Tensor:
    return shards[0].new_empty(numel, dtype=dtype)


def _traced_grad(grad: Tensor, shard: Tensor, number: int = 0) -> Tensor:
    return shard.new_empty(shard.shape)


def _nothing(*arguments: Any) -> None:
    return None


def _reduce(name: str, role: Role = Role.OTHER, fake: Callable[..., Tensor | None] = _nothing) -> Op:
    return Op(name, shards=1, fake=fake, role=role, has_effect=True, copies_grads=True)


OPS = {
    op.name: op
    for op in (
        Op("gather", shards=0, fake=_whole),
        Op("gather_eager", shards=0, fake=_whole),
        Op("gather_start", shards=0, fake=_whole, role=Role.START),
        Op("gather_group", shards=0, fake=_group, role=Role.START),
        Op("resident_start", shards=1, fake=_nothing, role=Role.START, has_effect=True),
        Op("resident_wait", shards=1, fake=_nothing, has_effect=True),
        _reduce("reduce", fake=_traced_grad),  # until a pass puts one of the next in its place
        _reduce("reduce_add", Role.REDUCE),
        _reduce("reduce_group", Role.REDUCE),
        _reduce("reduce_borrow", Role.REDUCE),
        _reduce("reduce_release"),
        Op("check_plan", shards=0, fake=_nothing, has_effect=True),
    )
}


def op_of(target: Any) -> Op | None:
    """The row of what a node of a graph calls; None where that is no op of ours."""
    if not isinstance(target, OpOverload) or target.namespace != NAMESPACE:
        return None
    return OPS.get(target.overloadpacket.__name__)
