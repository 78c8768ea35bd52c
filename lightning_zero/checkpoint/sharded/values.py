"""Tensors that are whole only in a checkpoint: what a rank is about to save of one, and what it may read of one.

Both stand in state dicts where the whole values stand in a full checkpoint, with the whole shape, so that hooks which
rename, add and remove entries need not know the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.ranges import Placed
from lightning_zero.checkpoint.sharded.boxes import Box, boxes, overlap
from lightning_zero.compat.tensors import disabled_torch_function, make_wrapper_subclass, tree_map_only
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.layout import ShardLayout, inverse
from lightning_zero.sharding.mapped import copy_mapped

__all__ = ["CheckpointTensor", "CheckpointShard"]

SHARED_BYTES = 1 << 20  # a smaller shard is not worth another piece in a file


class CheckpointShard(Tensor):
    """This rank's part of a tensor that is cut like a parameter.

    Attributes:
        cut: its layout.
        shard: 1-D, this rank's elements and padding; not a copy.
        number: of the shard, among those of its parameter.
        replica: which one it is of how many ranks that hold the same; each saves a part of what they hold.
    """

    cut: ShardLayout
    shard: Tensor
    number: int
    replica: tuple[int, int]
    # Results are plain tensors.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, layout: ShardLayout, shard: Tensor, number: int, replica: tuple[int, int] = (0, 1)
    ) -> CheckpointShard:
        made = make_wrapper_subclass(cls, layout.shape, dtype=shard.dtype, device=shard.device)
        made.cut, made.shard, made.number = layout, shard.detach().reshape(-1), number
        made.replica = replica
        return made

    @property
    def range(self) -> tuple[int, int]:
        """Of the flattened tensor, what this rank saves."""
        return _share(*self.cut.shard_range(self.number), self.replica, SHARED_BYTES // self.dtype.itemsize)

    def parts(self, most: int) -> list[tuple[Box, Tensor]]:
        """Boxes of the whole tensor, each with at most so many elements or a row, and this rank's values of them: views
        of the shard. None of the padding, and nothing that another rank saves."""
        begin, end = self.range
        order = self.cut.order
        found, position = [], begin - self.cut.shard_range(self.number)[0]
        for box in boxes(self.cut.memory_shape, begin, end, most):
            values = self.shard[position : position + box.numel].view(box.sizes)
            position += box.numel
            if order is not None:
                box, values = box.permuted(inverse(order)), values.permute(inverse(order))
            found.append((box, values))
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise UnsupportedError(
            f"{func} was called on a tensor that is about to be saved in a sharded checkpoint; no rank has all of its "
            "values. Rename, add or leave out entries of the state dict as you like; to compute with whole values, do "
            "it inside lightning_zero.full_parameters(module), or save with state_dict_type='full'."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CheckpointShard({tuple(self.shape)}, {self.dtype}, shard {self.number} of {self.cut.world_size})"


def _share(begin: int, end: int, replica: tuple[int, int], least: int) -> tuple[int, int]:
    """What one of several that hold elements ``begin`` to ``end`` saves of them: an equal part; of at most ``least``
    elements the first saves all, and the others nothing."""
    number, count = replica
    if end - begin <= least:
        return begin, end if number == 0 else begin
    return tuple(begin + (end - begin) * n // count for n in (number, number + 1))  # type: ignore[return-value]


class CheckpointTensor(Tensor):
    """A tensor of a checkpoint that is open, read only when it is wanted: a rank's part of it by
    :meth:`read_part`, all of it where torch computes with it. Where something is written to it, or a view of it is
    made, which may be written to, all of it stays in memory, and is what is there from then on.

    Attributes:
        chunks: the boxes in which it lies in files, and how to read each: a tensor of the box's sizes, or where such a
            one is placed.
        key: its own, for errors.
        held: all of it, once somebody may have written to it.
    """

    held: Tensor | None
    chunks: Sequence[tuple[Box, Callable[[], Tensor | Placed]]]
    key: str
    # Results are plain tensors.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        key: str,
        shape: torch.Size,
        dtype: torch.dtype,
        chunks: Sequence[tuple[Box, Callable[[], Tensor | Placed]]],
    ) -> CheckpointTensor:
        made = make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        made.key, made.chunks, made.held = key, chunks, None
        return made

    def whole(self) -> Tensor:
        """All of it, in memory of its own."""
        value = torch.empty(self.shape, dtype=self.dtype)
        everything = Box((0,) * value.dim(), tuple(value.shape))
        self._read([(everything, value)])
        return value

    def read_part(self, shard: Tensor, layout: ShardLayout, number: int) -> None:
        """Writes the elements of shard ``number`` into the 1-D ``shard``, any device and dtype, and zeros into its
        padding."""
        begin, end = layout.shard_range(number)
        order = layout.order
        wanted, position = [], 0
        for box in boxes(layout.memory_shape, begin, end):
            values = shard[position : position + box.numel].view(box.sizes)
            position += box.numel
            if order is not None:
                box, values = box.permuted(inverse(order)), values.permute(inverse(order))
            wanted.append((box, values))
        self._read(wanted)
        shard[end - begin :].zero_()

    def _read(self, wanted: Sequence[tuple[Box, Tensor]]) -> None:
        for held, read in self.chunks:
            shared = [(common, box, target) for box, target in wanted if (common := overlap(held, box)) is not None]
            if not shared:
                continue
            values = read()
            for common, box, target in shared:
                index, part = common.within(held), target[common.within(box)]
                if isinstance(values, Placed):
                    values.copy(index, part)
                else:
                    copy_mapped(values[index], part)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        known = {argument.name: argument for argument in func._schema.arguments}
        given = [_taken(argument, value) for argument, value in zip(known.values(), args, strict=False)]
        named = {name: _taken(known[name], value) for name, value in (kwargs or {}).items()}
        return func(*given, **named)

    def kept(self) -> Tensor:
        """All of it, as it is from now on."""
        if self.held is None:
            self.held = value = self.whole()
            self.chunks = [(Box((0,) * value.dim(), tuple(value.shape)), lambda: value)]
        return self.held

    # What torch does with memory that it takes for granted.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.whole())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self.kept().numpy(force=force)

    def tolist(self) -> Any:
        return self.whole().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CheckpointTensor({self.key!r}, {tuple(self.shape)}, {self.dtype})"


def _taken(argument: Any, value: Any) -> Any:
    """What stands for an argument of torch's: plain tensors. One that is written to, or of which a view is made, is
    kept."""
    return tree_map_only(CheckpointTensor, CheckpointTensor.whole if argument.alias_info is None else CheckpointTensor.kept, value)
