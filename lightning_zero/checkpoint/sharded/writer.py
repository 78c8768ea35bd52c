"""Write one rank's files of a sharded checkpoint in DCP's format.

A file holds items one after another, each as ``torch.save`` writes it. Files have no directory of their own:
:class:`StoredItem` says where each item is, and rank 0 collects these for ``.metadata``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from lightning_zero.checkpoint.file_writers import ChecksumWriter
from lightning_zero.checkpoint.integrity import FileChecksum
from lightning_zero.checkpoint.sharded.planner import PickledItem, StoredItem, TensorChunk

MAX_FILES = 4  # of one rank, each written by its own thread
MIN_FILE_BYTES = 64 << 20  # less is not worth another file
ALIGNMENT = 64  # bytes: torch.save aligns values within an item, so items must be aligned, too

Item = TensorChunk | PickledItem


@dataclass(frozen=True)
class RankFiles:
    """One rank's written files: checksums by name, and the items in them."""

    checksums: Mapping[str, FileChecksum]
    items: Sequence[StoredItem]


def write_items(
    items: Iterable[Item], rank: int, create: Callable[[str], BinaryIO], on_write: Callable[[int], None]
) -> RankFiles:
    """Write items into a few files concurrently."""
    files = _distribute(list(items))
    with ThreadPoolExecutor(len(files), "lightning_zero-checkpoint") as threads:
        names = [f"__{rank}_{number}.distcp" for number in range(len(files))]
        ends = [threads.submit(_write_file, *work, create, on_write) for work in zip(names, files, strict=True)]
        results = [end.result() for end in ends]
    checksums = {name: checksum for name, (checksum, _) in zip(names, results, strict=True)}
    return RankFiles(checksums, [item for _, stored in results for item in stored])


def _distribute(items: list[Item]) -> list[list[Item]]:
    """Return about equal bytes for each file, in order."""
    total = sum(item.bytes for item in items)
    count = max(1, min(MAX_FILES, total // MIN_FILE_BYTES))
    files: list[list[Item]] = [[] for _ in range(count)]
    before = 0
    for item in items:
        files[min(count - 1, before * count // max(1, total))].append(item)
        before += item.bytes
    return files


def _write_file(
    name: str, items: list[Item], create: Callable[[str], BinaryIO], on_write: Callable[[int], None]
) -> tuple[FileChecksum, list[StoredItem]]:
    stored = []
    with ChecksumWriter(create(name), lambda count: on_write(0)) as file:  # also reports within an item
        for item in items:
            file.write(bytes(-file.tell() % ALIGNMENT))
            begin, shape, dtype, box = file.tell(), None, None, None
            if isinstance(item, TensorChunk):
                shape, dtype, box = item.shape, item.values.dtype, item.box
                torch.save(_without_storage_gaps(item.values), file)  # type: ignore[arg-type]
            else:
                file.write(item.data)
            stored.append(StoredItem(item.keys, name, begin, file.tell() - begin, shape, dtype, box))
            on_write(item.bytes)
    return file.checksum, stored


def _without_storage_gaps(values: Tensor) -> Tensor:
    """Return the values on the CPU in a storage of their size: ``torch.save`` writes complete storages."""
    # The conjugate and negative bits are not part of the stored bytes.
    values = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if values.untyped_storage().nbytes() == values.numel() * values.itemsize:
        return values
    if not values.numel():
        return torch.empty_like(values)
    return torch.frombuffer(values.view(-1).view(torch.uint8).numpy(), dtype=values.dtype).view(values.shape)
