"""Writes a module's weights as safetensors: ranks write different files at once, each gathered when its turn comes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lightning_zero.checkpoint.claim import concurrent_save_error
from lightning_zero.checkpoint.disk import AT_ONCE, Disk
from lightning_zero.checkpoint.held import PinnedDirectory
from lightning_zero.checkpoint.places import INCOMPLETE, beside, make_folders, remove, sync_folder
from lightning_zero.checkpoint.together import Together
from lightning_zero.checkpoint.unseen import Unseen
from lightning_zero.checkpoint.weights.files import INDEX, Part, plan_files

__all__ = ["Weight", "export", "to_cpu"]


@dataclass(frozen=True)
class Weight:
    """One that is to be written.

    Attributes:
        bytes: that it takes in the file.
        gather: gives all of it, somewhere. Collective where it is sharded.
        keep: makes of that what is written: on the CPU, in memory of its own. Where a rank has too little memory for
            it, the others must not wait for that rank's next gather.
    """

    bytes: int
    gather: Callable[[], Tensor]
    keep: Callable[[Tensor], Tensor]


def export(
    weights: Mapping[str, Weight],
    folder: Path,
    most: int,
    together: Together,
    metadata: Mapping[str, str],
    wrote: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Writes all of them. Collective. Holds at most one file's tensors on each rank.

    Args:
        weights: by name, the same on every rank.
        folder: where the files go, beside whatever else is there.
        most: bytes in a file.
        together: the ranks.
        metadata: into each file.
        wrote: is told, from another thread, how many bytes more this rank has written.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: on every rank. An earlier export into the folder is still there, unless the new files were
            complete already.
    """
    files = plan_files({key: weight.bytes for key, weight in weights.items()}, most)
    what = f"export weights to {folder}"
    claimed: list[PinnedDirectory] = []
    together.first(what, lambda: claimed.append(_claimed(folder)))
    ends: list[Future[None]] = []
    try:
        with ThreadPoolExecutor(1, "lightning_zero-export") as thread:
            for number, part in enumerate(files):
                here = number % together.world_size == together.rank
                if here and ends:
                    ends[-1].exception()  # no second file in memory
                tensors, error = _gathered(part, weights, here)
                together.each(what, partial(_stop_for, error, ends))
                if here:
                    ends.append(thread.submit(_write, folder / part.name, tensors, dict(metadata), wrote))
                del tensors
        together.each(what, lambda: [end.result() for end in ends] and None)
        together.first(what, lambda: _put_in_place(folder, files, weights))
    finally:
        for part in files[together.rank :: together.world_size]:  # nobody else knows when they are no longer written
            remove(beside(folder / part.name, INCOMPLETE))
        for held in claimed:
            held.release()
    return [part.name for part in files]


def _claimed(folder: Path) -> PinnedDirectory:
    """Make the folder, and hold it against other exports into it."""
    make_folders(folder)
    held = PinnedDirectory(folder)
    if not held.claim():
        raise concurrent_save_error(folder)
    return held


def _gathered(part: Part, weights: Mapping[str, Weight], here: bool) -> tuple[dict[str, Tensor], Exception | None]:
    """The tensors of a file where they are wanted ``here``, or why this rank cannot have them."""
    tensors: dict[str, Tensor] = {}
    error: Exception | None = None
    for key in part.keys:
        whole = weights[key].gather()
        if here and error is None:
            try:
                tensors[key] = weights[key].keep(whole)
            except (MemoryError, RuntimeError) as caught:  # torch's of the host's memory is the second
                error = caught
                tensors.clear()
    return tensors, error


def _stop_for(error: Exception | None, ends: Sequence[Future[None]]) -> None:
    """What was written before may have failed meanwhile, too."""
    if error is not None:
        raise error
    for end in ends:
        if end.done():
            end.result()


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], wrote: Callable[[int], None]) -> None:
    """Write one file under its temporary name and flush it to the disk.

    Raises:
        ValueError: safetensors has no name for a tensor's dtype.
        OSError: the file could not be written.
    """
    work = beside(path, INCOMPLETE)
    work.touch()
    mode = work.stat().st_mode
    try:
        with Unseen(lambda count: wrote(0)):  # save_file() reports no progress, and the other ranks wait for this one
            save_file(tensors, work, {"format": "pt"} | metadata)
    except KeyError as error:  # the library looks the dtype up
        key, dtype = next((key, value.dtype) for key, value in tensors.items() if value.dtype in error.args)
        instead = "Make it torch.complex64" if dtype.is_complex else "Export with dtype="
        raise ValueError(f"safetensors cannot hold {key!r}, of {dtype}. {instead}, or leave it out.") from None
    except SafetensorError as error:
        raise OSError(f"{error}: {str(path)!r}") from error
    os.chmod(work, mode)  # safetensors 0.8 makes files that only their owner may read
    with open(work, "rb") as file:
        disk, size = Disk(file.fileno()), os.fstat(file.fileno()).st_size
        for begin in range(0, size, AT_ONCE):
            count = min(AT_ONCE, size - begin)
            disk.follow(count)
            wrote(count)
        disk.settle(lambda: wrote(0))


def _put_in_place(folder: Path, files: Sequence[Part], weights: Mapping[str, Weight]) -> None:
    # Whoever reads must not take files of an earlier export for this one's, nor some of each where this process dies:
    # without an index several files are nothing.
    for path in list(_of_an_export(folder)):
        path.unlink()
    for part in files:
        os.replace(beside(folder / part.name, INCOMPLETE), folder / part.name)
    sync_folder(folder)
    if len(files) > 1:
        total = sum(weight.bytes for weight in weights.values())
        where = {key: part.name for part in files for key in part.keys}
        work = beside(folder / INDEX, INCOMPLETE)
        with open(work, "w") as file:
            json.dump({"metadata": {"total_size": total}, "weight_map": where}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(work, folder / INDEX)
        sync_folder(folder)


def _of_an_export(folder: Path) -> Iterator[Path]:
    yield from folder.glob("model-?????-of-?????.safetensors")
    yield from (path for path in (folder / "model.safetensors", folder / INDEX) if path.exists())


def to_cpu(value: Tensor, dtype: torch.dtype | None, copy: bool) -> Tensor:
    """On the CPU, contiguous; numbers with a point in ``dtype``; with ``copy``, in memory of its own."""
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return value.detach().to("cpu", wanted, copy=copy).contiguous()
