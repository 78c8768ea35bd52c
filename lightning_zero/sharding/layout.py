"""Compute how one parameter is split into equal shards.

A parameter is flattened and split into ``world_size`` shards of one size, a multiple of 128 bytes. So an all-gather of
the shards gives the parameter itself, without a copy, followed by padding. The padding is always zero.

It is flattened in memory order: a ``channels_last`` weight of a convolution is ``channels_last`` again after the
all-gather. This is why shards are no DTensors: ``Shard(0)`` splits at rows of dimension 0, so small and odd shapes
would need padding copies around each collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT_BYTES = 128
STATE_BLOCK = 256  # elements with one scale of 8-bit optimizer state; torchao and bitsandbytes use as many
MIN_STATE_BLOCKS_NUMEL = 4096  # elements of a parameter with 8-bit state; smaller ones would save almost no memory


def is_strided(tensor: Tensor) -> bool:
    """Return True if the tensor is a plain strided one: not sparse, nested or quantized."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of a complex tensor as pairs of real numbers, and any other tensor unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a convolution's weight ordered by stride, the largest first.

    Return None for tensors of fewer than 4 dimensions, for contiguous ones, and for those with gaps or overlaps.
    """
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], tensor.shape[dim] == 1, dim)))
    if tensor.dim() < 4 or order == tuple(range(tensor.dim())) or not tensor.permute(order).is_contiguous():
        return None
    return order


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the permutation that undoes ``permute(order)``."""
    return tuple(order.index(dim) for dim in range(len(order)))


@dataclass(frozen=True)
class ShardLayout:
    """Describe how one parameter is split.

    Attributes:
        shard_numel: elements in each rank's shard, padding included; at least one alignment unit, so that even an empty
            parameter has a shard with its own address.
        world_size: number of shards.
        order: the dimensions in memory order, the slowest first; None if that is the order of the dimensions.
    """

    shape: torch.Size
    shard_numel: int
    world_size: int
    order: tuple[int, ...] | None = None

    @classmethod
    def from_shape(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        world_size: int,
        order: tuple[int, ...] | None = None,
        state_blocks: bool = False,
    ) -> ShardLayout:
        """Return the layout of a parameter.

        Args:
            state_blocks: no shard of a large parameter ends inside a block of 8-bit optimizer state.
        """
        unit = max(1, ALIGNMENT_BYTES // dtype.itemsize)
        if state_blocks and shape.numel() >= MIN_STATE_BLOCKS_NUMEL:
            unit = max(unit, STATE_BLOCK)  # both are powers of two
        piece = -(-shape.numel() // world_size)
        return cls(torch.Size(shape), max(unit, -(-piece // unit) * unit), world_size, order)

    @property
    def memory_shape(self) -> torch.Size:
        """Return the parameter's shape in memory order."""
        return self.shape if self.order is None else torch.Size(self.shape[dim] for dim in self.order)

    def permute_to_memory(self, full: Tensor) -> Tensor:
        """Return a view of ``full``, a tensor of the parameter's shape, in memory order."""
        return full if self.order is None else full.permute(self.order)

    def permute_from_memory(self, stored: Tensor) -> Tensor:
        """Undo :meth:`permute_to_memory`."""
        return stored if self.order is None else stored.permute(inverse(self.order))

    def full_view(self, flat: Tensor) -> Tensor:
        """Return the full parameter as a view of the first elements of the 1-D ``flat``."""
        return self.permute_from_memory(flat[: self.numel].view(self.memory_shape))

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def has_state_blocks(self) -> bool:
        """Return True if the parameter is large and no shard ends inside a block of 8-bit optimizer state."""
        return self.numel >= MIN_STATE_BLOCKS_NUMEL and self.shard_numel % STATE_BLOCK == 0

    @property
    def block_layout(self) -> ShardLayout:
        """Return the layout of a tensor with one element for each block of the parameter in memory order."""
        blocks = torch.Size([-(-self.numel // STATE_BLOCK)])
        return ShardLayout(blocks, self.shard_numel // STATE_BLOCK, self.world_size)

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the full parameter's strides, in elements."""
        strides, step = [0] * len(self.shape), 1
        for dim in reversed(self.order or range(len(self.shape))):
            strides[dim] = step
            step *= max(1, self.shape[dim])
        return tuple(strides)

    @property
    def visible_shape(self) -> torch.Size:
        """Return the shard's shape as users see it: (1, ..., 1, :attr:`shard_numel`).

        It has as many dimensions as the parameter.

        Users split weight decay by ``p.ndim``. A scalar's shard is 1-D, because it has more than one element.
        """
        return torch.Size((1,) * (len(self.shape) - 1) + (self.shard_numel,))

    def shard_range(self, number: int) -> tuple[int, int]:
        """Return the half-open range of the flattened parameter in shard ``number``.

        It is empty if the shard is all padding.
        """
        begin = min(number * self.shard_numel, self.numel)
        return begin, min(begin + self.shard_numel, self.numel)

    def part(self, full: Tensor, number: int) -> Tensor:
        """Return shard ``number`` of ``full`` in :attr:`visible_shape`, as a new tensor padded with zeros.

        Device and dtype are those of ``full``, which has the parameter's shape.
        """
        shard = torch.empty(self.shard_numel, dtype=full.dtype, device=full.device)
        self.write(shard, full, number)
        return shard.view(self.visible_shape)

    def write(self, shard: Tensor, full: Tensor, number: int) -> None:
        """Copy shard ``number`` of the full tensor into the 1-D ``shard``, and pad with zeros.

        ``full`` may have any device and dtype. If it has a method ``read_part``, as a tensor in a checkpoint file has,
        only this shard is read.
        """
        if (read_part := getattr(full, "read_part", None)) is not None:
            read_part(shard, self, number)
            return
        begin, end = self.shard_range(number)
        shard[: end - begin].copy_(self.permute_to_memory(full.detach()).reshape(-1)[begin:end])
        shard[end - begin :].zero_()


def whole_layout(shape: torch.Size) -> ShardLayout:
    """Return a layout of one shard without padding."""
    return ShardLayout(shape, shape.numel(), 1)


def extent(sizes: Iterable[int], strides: Iterable[int]) -> int:
    """Return the number of elements from a tensor's first to its last, both included.

    It is 0 for an empty tensor.
    """
    pairs = list(zip(sizes, strides, strict=True))
    return 0 if any(size == 0 for size, _ in pairs) else 1 + sum((size - 1) * stride for size, stride in pairs)


def should_read_gaps(values: Tensor, block: int) -> bool:
    """Return True if one read of the tensor's whole extent is cheaper than reads that skip its gaps.

    That is if the gaps are no larger than the tensor, or the extent fits into one read of ``block`` bytes.
    """
    span = extent(values.shape, values.stride())
    return span <= 2 * values.numel() or span * values.itemsize <= block


def is_dense(values: Tensor) -> bool:
    """Return True if a tensor has neither gaps nor overlaps."""
    spanned = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1 and stride != spanned:
            return False
        spanned *= size
    return True
