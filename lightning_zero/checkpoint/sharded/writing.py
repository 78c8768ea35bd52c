"""One rank's files of a sharded checkpoint, in the format of torch's distributed checkpoints: each holds boxes of
tensors one after another, each as ``torch.save`` writes it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.hashed import FileChecksum, ChecksumWriter

__all__ = ["Blob", "Piece", "RankFiles", "Written", "file_name", "packed", "write_items"]

MOST_FILES = 4  # of one rank, each written by a thread of its own
ALIGNMENT = 64  # bytes
FILE_BYTES = 64 << 20  # less is not worth another file


@dataclass(frozen=True)
class Piece:
    """A box of a tensor.

    Attributes:
        keys: of the tensor in the checkpoint; several where parameters are tied.
        shape: of the whole tensor.
        box: the part.
        values: of the box's sizes, on any device.
        guarded: whoever changes the values announces that, as with shards; others may change at any time.
    """

    keys: tuple[str, ...]
    shape: torch.Size
    box: Box
    values: Tensor
    guarded: bool = False

    @property
    def bytes(self) -> int:
        return self.box.numel * self.values.dtype.itemsize


@dataclass(frozen=True)
class Blob:
    """What is not a tensor, as :func:`packed` makes it."""

    keys: tuple[str, ...]
    data: bytes

    @property
    def bytes(self) -> int:
        return len(self.data)


def packed(value: Any) -> bytes:
    """As ``torch.save`` writes it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@dataclass(frozen=True)
class Written:
    """What was written, and where it lies.

    Attributes:
        keys: in the checkpoint.
        file: name in the folder.
        offset: in the file, in bytes.
        length: in bytes.
        shape: of the whole tensor; None for what is not a tensor.
        dtype: of the tensor.
        box: the part of it.
    """

    keys: tuple[str, ...]
    file: str
    offset: int
    length: int
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    box: Box | None = None


@dataclass(frozen=True)
class RankFiles:
    """What one rank has written: sums of its files by name, and what lies in them."""

    sums: Mapping[str, FileChecksum]
    placed: Sequence[Written]


def file_name(rank: int, number: int) -> str:
    """Of the ``number``-th file of a rank."""
    return f"__{rank}_{number}.distcp"


def write_items(
    items: Iterable[Piece | Blob], rank: int, create: Callable[[str], BinaryIO], wrote: Callable[[int], None]
) -> RankFiles:
    """Writes them into a few files at once.

    Args:
        items: this rank's.
        rank: this one.
        create: opens a new file of that name for writing.
        wrote: is told, from several threads, how many bytes of tensors more are written.
    """
    files = _shared_out(list(items))
    with ThreadPoolExecutor(len(files), "lightning_zero-checkpoint") as threads:
        names = [file_name(rank, number) for number in range(len(files))]
        ends = [threads.submit(_write_file, *given, create, wrote) for given in zip(names, files, strict=True)]
        results = [end.result() for end in ends]
    sums = {name: found for name, (found, _) in zip(names, results, strict=True)}
    return RankFiles(sums, [place for _, placed in results for place in placed])


def _shared_out(items: list[Piece | Blob]) -> list[list[Piece | Blob]]:
    """About equal bytes for each file; what comes one after the other stays so."""
    total = sum(item.bytes for item in items)
    count = max(1, min(MOST_FILES, total // FILE_BYTES))
    files: list[list[Piece | Blob]] = [[] for _ in range(count)]
    before = 0
    for item in items:
        files[min(count - 1, before * count // max(1, total))].append(item)
        before += item.bytes
    return files


def _write_file(
    name: str, items: list[Piece | Blob], create: Callable[[str], BinaryIO], wrote: Callable[[int], None]
) -> tuple[FileChecksum, list[Written]]:
    placed = []
    with ChecksumWriter(create(name), lambda count: wrote(0)) as file:  # that it goes on, also in the midst of an item
        for item in items:
            # So that values lie at multiples of this in the file, too, as torch.save puts them in what it writes.
            file.write(bytes(-file.tell() % ALIGNMENT))
            begin, whole, dtype, box = file.tell(), None, None, None
            if isinstance(item, Piece):
                whole, dtype, box = item.shape, item.values.dtype, item.box
                torch.save(_alone(item.values), file)  # type: ignore[arg-type]
            else:
                file.write(item.data)
            placed.append(Written(item.keys, name, begin, file.tell() - begin, whole, dtype, box))
            wrote(item.bytes)
    return file.sum, placed


def _alone(values: Tensor) -> Tensor:
    """The same values on the CPU, in a storage that holds nothing else: ``torch.save`` writes whole storages."""
    # What is conjugated or negated when it is read would be read as it lies there.
    values = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if values.untyped_storage().nbytes() == values.numel() * values.itemsize:
        return values
    if not values.numel():
        return torch.empty_like(values)
    return torch.frombuffer(values.view(-1).view(torch.uint8).numpy(), dtype=values.dtype).view(values.shape)
