"""Our ops: what torch, the passes and the model of costs must know of each besides its schema and its kernel.

Those stand side by side in ``csrc/ops.cpp``. A new op is a row there and a row in Python: beside the pass that puts it
into graphs, by :func:`register_op`, or here, if no pass does. ``tests/native/test_ops.py`` compares the two tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.tensors import OpOverload

__all__ = ["NAMESPACE", "FAKE_NAMESPACE", "OPS", "Op", "Role", "register_op", "graph_overloads", "no_result", "find_op", "reduce_op"]

NAMESPACE = "lightning_zero"
FAKE_NAMESPACE = "lightning_zero_on_paper"  # of what stands for an op where no graph is ever run, and nothing need be built


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


def _traced_grad(grad: Tensor, shard: Tensor, number: int = 0) -> Tensor:
    return shard.new_empty(shard.shape)


def no_result(*arguments: Any) -> None:
    """The fake of an op that returns nothing."""


def reduce_op(name: str, role: Role = Role.OTHER, fake: Callable[..., Tensor | None] = no_result) -> Op:
    """The row of an op whose first two arguments are gradients and their shards."""
    return Op(name, shards=1, fake=fake, role=role, has_effect=True, copies_grads=True)


OPS: dict[str, Op] = {}  # by name; complete once the modules of all passes are imported


def register_op(op: Op) -> Op:
    """Enters an op into the table. Called where a pass's module is imported, and so before the library is loaded, which
    is when torch is told of all ops."""
    assert op.name not in OPS, f"{op.name} has a row already"
    OPS[op.name] = op
    return op


register_op(Op("gather", shards=0, fake=_whole))
register_op(Op("gather_eager", shards=0, fake=_whole))
register_op(Op("gather_start", shards=0, fake=_whole, role=Role.START))
register_op(reduce_op("reduce", fake=_traced_grad))  # until a pass puts reduce_add in its place
register_op(reduce_op("reduce_add", Role.REDUCE))  # what eager code calls, too


def find_op(target: Any) -> Op | None:
    """The row of what a node of a graph calls; None where that is no op of ours."""
    if not isinstance(target, OpOverload) or target.namespace not in (NAMESPACE, FAKE_NAMESPACE):
        return None
    return OPS.get(target.overloadpacket.__name__)


def graph_overloads(op: Op) -> list[OpOverload]:
    """What nodes may call of an op: it, and what stands for it on paper; of the two, what this process has."""
    packets = (getattr(getattr(torch.ops, namespace), op.name, None) for namespace in (NAMESPACE, FAKE_NAMESPACE))
    return [packet.default for packet in packets if packet is not None]
