"""How one parameter is cut into equal pieces. Pure arithmetic.

A parameter is flattened and cut into ``world_size`` pieces of one size, a multiple of 128 bytes, so that all-gathering
the pieces gives the parameter itself, with no copy, followed by padding. The padding is zero, always.

It is flattened as it lies in memory: a convolution's weight that was ``channels_last`` is so again when it has been
gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ShardLayout", "as_real", "inverse", "is_strided", "memory_order"]

ALIGNMENT_BYTES = 128


def is_strided(tensor: Tensor) -> bool:
    """Whether the bytes of its elements say all: not of sparse, nested and quantized ones."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of a complex tensor as pairs of real numbers; any other tensor as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a convolution's weight, from the one with the widest stride on; None for tensors of fewer
    dimensions, for those that lie as their shape says, and for those with gaps or overlaps."""
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], tensor.shape[dim] == 1, dim)))
    if tensor.dim() < 4 or order == tuple(range(tensor.dim())) or not tensor.permute(order).is_contiguous():
        return None
    return order


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes ``permute(order)``."""
    return tuple(order.index(dim) for dim in range(len(order)))


@dataclass(frozen=True)
class ShardLayout:
    """The cut of one parameter.

    Attributes:
        shape: the whole parameter's.
        shard_numel: elements in each rank's piece, padding included; at least one alignment unit, so that even an empty
            parameter has a shard with an address of its own.
        world_size: number of pieces.
        order: its dimensions as they lie in memory, the slowest first; None where that is their own order.
    """

    shape: torch.Size
    shard_numel: int
    world_size: int
    order: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, shape: torch.Size, dtype: torch.dtype, world_size: int, order: tuple[int, ...] | None = None
    ) -> ShardLayout:
        """The layout of a parameter of this shape and dtype over ``world_size`` ranks."""
        unit = max(1, ALIGNMENT_BYTES // dtype.itemsize)
        piece = -(-shape.numel() // world_size)
        return cls(torch.Size(shape), max(unit, -(-piece // unit) * unit), world_size, order)

    @property
    def memory_shape(self) -> torch.Size:
        """The parameter's shape with its dimensions as they lie in memory."""
        return self.shape if self.order is None else torch.Size(self.shape[dim] for dim in self.order)

    def permute_to_memory(self, full: Tensor) -> Tensor:
        """``full``, of the parameter's shape, with its dimensions as they lie in memory: a view."""
        return full if self.order is None else full.permute(self.order)

    def permute_from_memory(self, stored: Tensor) -> Tensor:
        """The inverse of :meth:`permute_to_memory`."""
        return stored if self.order is None else stored.permute(inverse(self.order))

    def full_view(self, flat: Tensor) -> Tensor:
        """The parameter that the 1-D ``flat`` begins with: a view."""
        return self.permute_from_memory(flat[: self.numel].view(self.memory_shape))

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def strides(self) -> tuple[int, ...]:
        """The full parameter's strides, in elements."""
        strides, step = [0] * len(self.shape), 1
        for dim in reversed(self.order or range(len(self.shape))):
            strides[dim] = step
            step *= max(1, self.shape[dim])
        return tuple(strides)

    @property
    def visible_shape(self) -> torch.Size:
        """The shard's shape as users see it: as many dimensions as the parameter has, all but the last of size one.

        Users split weight decay by ``p.ndim``. (A scalar's shard is 1-D: it has more than one element.)
        """
        return torch.Size((1,) * (len(self.shape) - 1) + (self.shard_numel,))

    def shard_range(self, number: int) -> tuple[int, int]:
        """The half-open range of the flattened parameter that shard ``number`` is; empty where it is padding only."""
        begin = min(number * self.shard_numel, self.numel)
        return begin, min(begin + self.shard_numel, self.numel)

    def part(self, full: Tensor, number: int) -> Tensor:
        """Shard ``number`` of ``full`` (the parameter's shape), as users see it: on its device and in its dtype, padded
        with zeros. Memory of its own."""
        shard = torch.empty(self.shard_numel, dtype=full.dtype, device=full.device)
        self.write(shard, full, number)
        return shard.view(self.visible_shape)

    def write(self, shard: Tensor, full: Tensor, number: int) -> None:
        """Copies shard ``number`` of ``full`` (the parameter's shape, any device and dtype) into the 1-D ``shard``;
        pads with zeros. A tensor that lies in a checkpoint is asked for this part alone: it has ``read_part``."""
        if (read_part := getattr(full, "read_part", None)) is not None:
            read_part(shard, self, number)
            return
        begin, end = self.shard_range(number)
        shard[: end - begin].copy_(self.permute_to_memory(full.detach()).reshape(-1)[begin:end])
        shard[end - begin :].zero_()
