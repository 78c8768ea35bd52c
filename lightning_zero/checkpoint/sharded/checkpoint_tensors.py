"""Tensor subclasses in state dicts of sharded checkpoints: shards to save, and lazily read tensors.

:class:`CheckpointShard` is this rank's part of a tensor that is about to be saved. :class:`CheckpointTensor` is a
tensor of an open checkpoint; a rank reads its part, or all of it if torch computes with it. Both have the full shape,
so hooks can rename, add and remove entries as in a full checkpoint.

Files are read by a few large reads in flight and not through mapped memory, which is measured to be slower, from a disk
and from the page cache. And if a mapped file is truncated meanwhile, SIGBUS ends the process.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.sharded.boxes import Box, boxes, overlap
from lightning_zero.compat.modules import extra_state_suffix
from lightning_zero.compat.tensors import make_wrapper_subclass, tree_map_only
from lightning_zero.errors import CheckpointError, UnsupportedError
from lightning_zero.sharding.host_memory import copy_mapped, read_in_chunks
from lightning_zero.sharding.layout import ShardLayout, extent, inverse, should_read_gaps

READ_BYTES = 4 << 20  # of one read
READ_THREADS = 4
MIN_SHARED_BYTES = 1 << 20  # a smaller shard is written by one replica: not worth another chunk in a file


class RangeReader:
    """Read ranges of a local file, which stays the same one if another file replaces it."""

    def __init__(self, path: str | Path) -> None:
        self._path, self._descriptor = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, begin: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``begin`` on.

        Raises:
            CheckpointError: the file ends earlier, or cannot be read any more.
        """
        read_in_chunks(len(into), READ_BYTES, READ_THREADS, lambda at, end: self._read_block(begin + at, into[at:end]))

    def _read_block(self, begin: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._descriptor, [into[done:]], begin + done)
            except OSError as error:
                raise self._error(os.strerror(error.errno or 0)) from error
            if not count:
                raise self._error(f"it ends at {begin + done:,} bytes")
            done += count

    def _error(self, why: str) -> CheckpointError:
        path = self._path
        with suppress(OSError):  # in a pinned directory the given path is one of /proc
            path = os.readlink(f"/proc/self/fd/{self._descriptor}")
        return CheckpointError(
            f"{path} was cut off, or its disk is gone, while it was being read ({why}). Use another checkpoint."
        )


class StoredTensor:
    """A tensor in a file."""

    def __init__(
        self,
        reader: RangeReader,
        start: int,
        dtype: torch.dtype,
        sizes: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> None:
        self._reader, self._start = reader, start
        meta = torch.empty(tuple(sizes), dtype=dtype, device="meta")
        self._meta = meta if strides is None else meta.as_strided(tuple(sizes), tuple(strides))
        self.shape, self.dtype = self._meta.shape, dtype

    def copy(self, index: tuple[slice, ...], into: Tensor) -> None:
        """Do ``into.copy_(self[index])``, and read only these elements.

        Raises:
            CheckpointError: the file ends earlier, or cannot be read any more.
        """
        self._copy(self._meta[index], into.detach())

    def _copy(self, meta: Tensor, into: Tensor) -> None:
        if not meta.numel():
            return
        if not meta.is_contiguous() or not into.is_contiguous():
            self._copy_strided(meta, into)
            return
        begin, target = self._start + int(meta.storage_offset()) * meta.itemsize, into.view(-1)
        if type(into) is Tensor and into.device.type == "cpu" and into.dtype == self.dtype:
            self._reader.read(begin, memory_of(target))
            return
        count = max(1, min(READ_THREADS * READ_BYTES // meta.itemsize, target.numel()))
        block = torch.empty(count, dtype=self.dtype, pin_memory=into.is_cuda)
        for at in range(0, target.numel(), count):
            part = target[at : at + count]
            self._reader.read(begin + at * meta.itemsize, memory_of(block[: part.numel()]))
            part.copy_(block[: part.numel()])

    def _copy_strided(self, meta: Tensor, into: Tensor) -> None:
        """Read the gaps between elements, too, unless they are large."""
        span = extent(meta.shape, meta.stride())
        if should_read_gaps(meta, READ_BYTES):
            flat = torch.empty(span, dtype=self.dtype)
            self._reader.read(self._start + int(meta.storage_offset()) * meta.itemsize, memory_of(flat))
            into.copy_(flat.as_strided(meta.shape, meta.stride()))
            return
        for row, target in zip(meta, into, strict=True):
            self._copy(row, target)


def memory_of(values: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which must outlive the result."""
    count = values.numel() * values.itemsize
    return memoryview((ctypes.c_ubyte * count).from_address(values.data_ptr())).cast("B")


def _boxes_of(
    shard: Tensor, layout: ShardLayout, begin: int, end: int, max_numel: int | None = None
) -> list[tuple[Box, Tensor]]:
    """Return boxes of elements ``begin`` to ``end``, with their values as views of the 1-D ``shard``."""
    found, position = [], 0
    for box in boxes(layout.memory_shape, begin, end, max_numel):
        values = shard[position : position + box.numel].view(box.sizes)
        position += box.numel
        if layout.order is not None:
            box, values = box.permuted(inverse(layout.order)), values.permute(inverse(layout.order))
        found.append((box, values))
    return found


class CheckpointShard(Tensor):
    """This rank's part of a tensor that is sharded like a parameter, to be saved.

    Attributes:
        shard: 1-D, this rank's elements and padding; not a copy.
        number: of the shard among those of its parameter.
        replica: number and count of the ranks that hold the same shard; each saves a part of it.
    """

    cut: ShardLayout
    shard: Tensor
    number: int
    replica: tuple[int, int]
    # Results are plain tensors.
    __torch_function__ = nn.Parameter.__torch_function__  # type: ignore[assignment]

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
        """Positions in the flattened tensor that this rank saves."""
        begin, end = self.cut.shard_range(self.number)
        number, count = self.replica
        if end - begin <= MIN_SHARED_BYTES // self.dtype.itemsize:
            return begin, end if number == 0 else begin
        return begin + (end - begin) * number // count, begin + (end - begin) * (number + 1) // count

    def parts(self, max_numel: int) -> list[tuple[Box, Tensor]]:
        """Return boxes of the full tensor with this rank's values, which are views of the shard.

        Excludes the padding and the part of other replicas. A box has at most ``max_numel`` elements.
        """
        begin, end = self.range
        return _boxes_of(self.shard[begin - self.cut.shard_range(self.number)[0] :], self.cut, begin, end, max_numel)

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


class Source(Protocol):
    """A tensor that is read when its elements are copied."""

    def copy(self, index: tuple[slice, ...], into: Tensor) -> None:
        """Do ``into.copy_(self[index])``."""


Chunk = tuple[Box, Callable[[], Tensor | Source]]


class CheckpointTensor(Tensor):
    """A tensor of an open checkpoint, read lazily.

    :meth:`read_part` reads a shard; operators read all of it. If an operator writes to it or makes a view of it, the
    full value stays in memory and replaces that of the file.

    Attributes:
        chunks: boxes in files, and functions that return their tensor, or where it is stored.
        held: the full value after an operator may have written to it.
    """

    held: Tensor | None
    chunks: Sequence[Chunk]
    key: str
    # Results are plain tensors.
    __torch_function__ = nn.Parameter.__torch_function__  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, key: str, shape: torch.Size, dtype: torch.dtype, chunks: Sequence[Chunk]) -> CheckpointTensor:
        made = make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        made.key, made.chunks, made.held = key, chunks, None
        return made

    def full_tensor(self) -> Tensor:
        value = torch.empty(self.shape, dtype=self.dtype)
        self._read([(Box.whole(value.shape), value)])
        return value

    def read_part(self, shard: Tensor, layout: ShardLayout, number: int) -> None:
        """Write the elements of shard ``number`` into the 1-D ``shard``, and zeros into its padding."""
        begin, end = layout.shard_range(number)
        self._read(_boxes_of(shard, layout, begin, end))
        shard[end - begin :].zero_()

    def _read(self, wanted: Sequence[tuple[Box, Tensor]]) -> None:
        for chunk, read in self.chunks:
            shared = [(common, box, target) for box, target in wanted if (common := overlap(chunk, box)) is not None]
            if not shared:
                continue
            values = read()
            for common, box, target in shared:
                index, part = common.within(chunk), target[common.within(box)]
                if isinstance(values, Tensor):
                    copy_mapped(values[index], part)
                else:
                    values.copy(index, part)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        known = {argument.name: argument for argument in func._schema.arguments}
        plain = [_plain_argument(argument, value) for argument, value in zip(known.values(), args, strict=False)]
        named = {name: _plain_argument(known[name], value) for name, value in (kwargs or {}).items()}
        return func(*plain, **named)

    def hold(self) -> Tensor:
        """Read the full value, and keep it from now on."""
        if self.held is None:
            self.held = value = self.full_tensor()
            self.chunks = [(Box.whole(value.shape), lambda: value)]
        return self.held

    # torch implements these by the storage, without the dispatcher.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.full_tensor())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self.hold().numpy(force=force)

    def tolist(self) -> Any:
        return self.full_tensor().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CheckpointTensor({self.key!r}, {tuple(self.shape)}, {self.dtype})"


def _plain_argument(argument: Any, value: Any) -> Any:
    """Return plain tensors for an operator's argument; hold those that it writes to or makes views of."""
    to_plain = CheckpointTensor.full_tensor if argument.alias_info is None else CheckpointTensor.hold
    return tree_map_only(CheckpointTensor, to_plain, value)


# -- values that on_load_checkpoint() has put into a module


def materialize_values(module: nn.Module) -> None:
    """Replace each :class:`CheckpointTensor` in a module by a plain one; tied ones stay tied.

    Raises:
        ValueError: one has lost its memory to ``param.data = value``, for which torch uses only the storage.
    """
    made: dict[int, Tensor] = {}
    for prefix, child in module.named_modules():
        parameters = dict(child.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(child.named_buffers(recurse=False, remove_duplicate=False))
        for name, value in (parameters | buffers).items():
            if isinstance(value, CheckpointTensor):
                if id(value) not in made:
                    full = value.full_tensor()
                    made[id(value)] = nn.Parameter(full, value.requires_grad) if name in parameters else full
                setattr(child, name, made[id(value)])
            elif _has_lost_storage(value):
                full_name = f"{prefix}.{name}" if prefix else name
                raise ValueError(
                    f"{full_name!r} has no memory: its .data was set to a value of the checkpoint, which is only read "
                    "when it is wanted. In on_load_checkpoint() set .data to value.clone(), or leave it to "
                    "load_state_dict()."
                )


def materialize_extra_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``state`` with plain tensors for ``set_extra_state()`` of modules, which may keep them."""
    owned: Any = copy(state)  # with torch's metadata of module versions
    for key, value in state.items():
        if key.rpartition(".")[2] == extra_state_suffix:
            owned[key] = tree_map_only(CheckpointTensor, CheckpointTensor.full_tensor, value)
    return owned  # type: ignore[no-any-return]


def _has_lost_storage(value: Tensor) -> bool:
    plain = type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu" and value.layout is torch.strided
    return plain and value.numel() > 0 and not value.data_ptr()
