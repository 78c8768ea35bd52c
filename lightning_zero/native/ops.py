"""Table of our ops, with the properties that torch, the passes and the cost model need.

Schemas and kernels are in ``csrc/ops.cpp``. A new op needs a row there and one in Python, by :func:`register_op`: next
to the pass that inserts it into graphs, or here. ``tests/native/test_ops.py`` compares the two tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.tensors import OpOverload

NAMESPACE = "lightning_zero"
FAKE_NAMESPACE = (
    # namespace of placeholders in graphs that never run, so that the library need not be built
    "lightning_zero_on_paper"
)


class Role(Enum):
    """Function of an op in a graph after the passes."""

    START = auto()  # starts gathers
    REDUCE = auto()  # enqueues gradients
    KERNEL = auto()  # reads results of kernels and returns what others read, so it stays among them
    OTHER = auto()


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        shards: Position of the argument that is the parameter's shard, or a list of shards.
        has_effect: The op has a side effect, so graphs must keep it even if its result is unused.
        copies_grads: The op costs a copy of its first argument into a bucket; otherwise only its launch.
    """

    name: str
    shards: int
    fake: Callable[..., Tensor | None]
    role: Role = Role.OTHER
    has_effect: bool = False
    copies_grads: bool = False

    @property
    def overload(self) -> OpOverload:
        """The overload in graphs; after :func:`~lightning_zero.native.load.load`."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default


def fake_full(shard: Tensor, shape: list[int], dtype: torch.dtype, cache: Tensor | None = None) -> Tensor:
    """Fake of an op that returns a full parameter."""
    return shard.new_empty(shape, dtype=dtype)


def _traced_grad(grad: Tensor, shard: Tensor, number: int = 0) -> Tensor:
    return shard.new_empty(shard.shape)


def no_result(*arguments: Any) -> None:
    """Fake of an op that returns nothing."""


def reduce_op(name: str, role: Role = Role.OTHER, fake: Callable[..., Tensor | None] = no_result) -> Op:
    """Return the row of an op whose first two arguments are gradients and their shards."""
    return Op(name, shards=1, fake=fake, role=role, has_effect=True, copies_grads=True)


OPS: dict[str, Op] = {}  # by name; complete after the modules of all passes are imported


def register_op(op: Op) -> Op:
    """Add an op to the table.

    Call it on import of a pass's module: torch is given all ops when the library is loaded.
    """
    assert op.name not in OPS, f"{op.name} has a row already"
    OPS[op.name] = op
    return op


register_op(Op("gather", shards=0, fake=fake_full))
register_op(Op("gather_eager", shards=0, fake=fake_full))
register_op(Op("gather_start", shards=0, fake=fake_full, role=Role.START))
register_op(reduce_op("reduce", fake=_traced_grad))  # replaced by reduce_add in a pass
register_op(reduce_op("reduce_add", Role.REDUCE))  # also used by eager code


def find_op(target: Any) -> Op | None:
    """Return the row of the op that a node calls; None if it is not one of ours."""
    if not isinstance(target, OpOverload) or target.namespace not in (NAMESPACE, FAKE_NAMESPACE):
        return None
    return OPS.get(target.overloadpacket.__name__)


def graph_overloads(op: Op) -> list[OpOverload]:
    """Return the overloads of an op and of its placeholder, as far as this process has them."""
    packets = (getattr(getattr(torch.ops, namespace), op.name, None) for namespace in (NAMESPACE, FAKE_NAMESPACE))
    return [packet.default for packet in packets if packet is not None]
