"""Full checkpoints: gather plain state dicts on rank 0, tensor by tensor, and write them as one file.

The file is one of ``torch.save`` with the keys of a plain module. A local file is replaced atomically. At a URL the
file is streamed, so that the host holds it once: object stores show it when it is closed, and elsewhere a temporary
file is moved in place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn

from lightning_zero.checkpoint.atomic import (
    INCOMPLETE,
    LOCK_TIMEOUT_S,
    check_replaceable,
    check_replaceable_folder,
    concurrent_save_error,
    is_at,
    make_folders,
    remove,
    removing_leftover,
    replace_atomically,
    restore_replaced,
    sibling_path,
    taken_error,
    try_lock,
    unlock,
)
from lightning_zero.checkpoint.file_writers import ChecksumWriter, ThreadedWriter, stable_memory
from lightning_zero.checkpoint.remote_files import move_file, remove_tree, remove_within, resolve_url
from lightning_zero.checkpoint.sharded.folder import finish_interrupted_save
from lightning_zero.sharding.host_memory import copy_to_host
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.state_dict import StateDictHooks, full_on_cpu, ignore_bytes

# Object stores have no rename, and show a file only after it was closed.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "obs", "tos"}

OnWrite = Callable[[int], None]


def model_state(
    module: nn.Module, hooks: StateDictHooks, on_gather: Callable[[int], object] = ignore_bytes
) -> dict[str, Any]:
    """Return the full state dict on the CPU of rank 0, and an empty one on other ranks. Collective."""
    is_rank0 = hooks.sharder.mesh.rank == 0
    tied: dict[int, Tensor | None] = {}  # stay one tensor, as in a plain module's state dict
    full: set[int] = set()

    def gather(record: ShardedParameter) -> Tensor | None:
        if record.index in tied:
            value = tied[record.index]
        else:
            value = full_on_cpu(record, is_rank0)
            on_gather(record.layout.numel * record.param.itemsize)
        if len(record.owners) > 1:
            tied[record.index] = value
        full.add(id(value))  # the state dict keeps it, so the id is not used again
        return value

    with hooks.overriding_values(gather):
        state = module.state_dict()
    if not is_rank0:
        return {}
    copies: dict[int, Tensor] = {}  # of buffers: they may change while the file is written
    for key, value in state.items():
        if isinstance(value, Tensor) and id(value) not in full:
            state[key] = copies.setdefault(id(value), copy_to_host(value))
    return state


def write_full(value: Any, path: str | Path, on_write: OnWrite = lambda count: None) -> None:
    """Save ``value`` with ``torch.save`` at a path or URL, and replace a checkpoint there.

    On an error the previous checkpoint remains.

    Args:
        path: a local path, or a URL as fsspec takes it.
        on_write: is called, possibly from another thread, with the number of bytes after each write.

    Raises:
        CheckpointError: a folder that is no checkpoint is there, or another process saves there at the same time.
    """
    fs, place = resolve_url(path)
    if isinstance(fs, LocalFileSystem):
        write_local_file(value, Path(place), on_write)
    else:
        write_remote_file(value, str(path), on_write)


def write_local_file(value: Any, path: Path, on_write: OnWrite = lambda count: None) -> None:
    """Save ``value`` on a file system that this host mounts, see :func:`write_full`."""
    work = sibling_path(path, INCOMPLETE)
    with removing_leftover(work, path):
        restore_replaced(path)
        check_replaceable_folder(path)
        make_folders(path.parent)
    try:
        file = open(work, "xb", buffering=0)  # noqa: SIM115 - ThreadedWriter closes it
    except FileExistsError:
        raise concurrent_save_error(path) from None
    if not try_lock(file.fileno(), LOCK_TIMEOUT_S) or not is_at(work, file.fileno()):
        file.close()
        raise concurrent_save_error(path)
    pinned = os.dup(file.fileno())  # keeps the inode number from being used again
    try:
        with ThreadedWriter(file, stable_memory(value), on_write) as writer:
            torch.save(value, writer)  # type: ignore[arg-type]
        if not is_at(work, pinned):
            raise taken_error(path)
        replace_atomically(work, path)
    except BaseException:
        with suppress(OSError):  # the first error has the cause
            if is_at(work, pinned):
                remove(work)
        raise
    finally:
        unlock(pinned)
        os.close(pinned)


def write_remote_file(value: Any, url: str, on_write: OnWrite = lambda count: None) -> None:
    """Save ``value`` at a URL, see :func:`write_full`."""
    # A separate instance: a transaction defers all writes on its instance, and loggers may share the cached one.
    fs, place = resolve_url(url, skip_instance_cache=True)
    place = place.rstrip("/")
    is_store = not OBJECT_STORES.isdisjoint([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)
    work = place if is_store else f"{place}{INCOMPLETE}"
    if fs.isdir(place):
        check_replaceable(url, [entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(place, detail=False)])
    finish_interrupted_save(fs, place)  # else readers would prefer the files of a killed save to this one
    had_folder = fs.isdir(place)
    if parent := place.rpartition("/")[0]:
        fs.makedirs(parent, exist_ok=True)
    try:
        with fs.transaction if is_store else nullcontext(), ChecksumWriter(fs.open(work, "wb"), on_write) as file:
            torch.save(value, file)  # type: ignore[arg-type]
        if had_folder and is_store:
            remove_within(fs, place)  # the new object has the same name
        elif had_folder:
            remove_tree(fs, place)
        if work != place:
            move_file(fs, work, place)
    except BaseException:
        if work != place:
            with suppress(Exception):  # the first error has the cause
                fs.rm_file(work)
        raise
    finally:
        resolve_url(url)[0].invalidate_cache()  # of the instance that others use
