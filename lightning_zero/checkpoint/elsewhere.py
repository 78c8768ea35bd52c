"""Single files where fsspec reaches and no file system of this host does: written as a stream, so that they stand in
memory once, as what is saved, and not a second time as bytes.

Object stores show what was written when it is closed, and keep what they had until then. Others are given the file
beside its place, and rename it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch

from lightning_zero.checkpoint.exactly import move_file, remove_tree, remove_within
from lightning_zero.checkpoint.locating import located
from lightning_zero.checkpoint.places import INCOMPLETE
from lightning_zero.checkpoint.replaceable import check_replaceable
from lightning_zero.checkpoint.sharded.folder import settle
from lightning_zero.checkpoint.sharded.hashed import ChecksumWriter
from lightning_zero.checkpoint.unseen import Unseen

__all__ = ["write_remote_file"]

# Of stores without a rename, which would copy all of it once more.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "obs", "tos"}


def write_remote_file(value: Any, url: str, wrote: Callable[[int], None] = lambda count: None) -> None:
    """Saves ``value`` there, in place of what stands there. Where this fails, that stays.

    Args:
        value: what ``torch.save`` takes.
        url: as fsspec takes it.
        wrote: is told how many bytes more are written; of none, from another thread, while others' code takes them on.

    Raises:
        CheckpointError: a folder of something else stands there.
    """
    with Unseen(lambda count: wrote(0)):
        _write(value, url, wrote)


def _write(value: Any, url: str, wrote: Callable[[int], None]) -> None:
    # An object of its own: in a transaction all that anybody opens on it is held back, and loggers write, too.
    fs, place = located(url, skip_instance_cache=True)
    place = place.rstrip("/")
    stores = not OBJECT_STORES.isdisjoint([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)
    work = place if stores else f"{place}{INCOMPLETE}"
    if fs.isdir(place):
        check_replaceable(url, [entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(place, detail=False)])
    settle(fs, place)  # of a sharded save, which readers would go on taking for what is there
    before = fs.isdir(place)
    if parent := place.rpartition("/")[0]:
        fs.makedirs(parent, exist_ok=True)
    try:
        with fs.transaction if stores else nullcontext(), ChecksumWriter(fs.open(work, "wb"), wrote) as file:
            torch.save(value, file)  # type: ignore[arg-type]
        if before and stores:
            remove_within(fs, place)  # the new one stands beside it, under the same name
        elif before:
            remove_tree(fs, place)
        if work != place:
            move_file(fs, work, place)
    except BaseException:
        if work != place:
            with suppress(Exception):  # the error that made it useless says more
                fs.rm_file(work)
        raise
    finally:
        located(url)[0].invalidate_cache()  # the one that others use may remember what was there
