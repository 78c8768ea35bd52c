"""Single files as ``torch.save`` writes them: written so that none is ever half there, and compared, before anybody
believes them, with the checksums that the format holds of each of its parts (they are zip archives)."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.behind import ThreadedWriter, lasting
from lightning_zero.checkpoint.claim import PATIENCE_S, concurrent_save_error, claim, release, unclaimed
from lightning_zero.checkpoint.damaged import wrap_read_errors
from lightning_zero.checkpoint.places import (
    INCOMPLETE,
    beside,
    restore_replaced,
    make_folders,
    replace_atomically,
    remove,
    remove_leftover,
)
from lightning_zero.checkpoint.replaceable import check_replaceable_folder
from lightning_zero.errors import CheckpointError

__all__ = ["verify_archive", "verify_open_archive", "write_checkpoint_file"]

BLOCK = 4 << 20  # bytes


def write_checkpoint_file(value: Any, path: Path, wrote: Callable[[int], None] = lambda count: None) -> None:
    """Saves ``value`` at ``path``, in place of what stands there: a file, a link or a folder.

    Args:
        value: what ``torch.save`` takes.
        path: on a file system of this host, or one that it mounts.
        wrote: is told, from another thread, how many bytes more are written.

    Raises:
        CheckpointError: a folder of something else stands there, or somebody else saves there at the same time.
    """
    work = beside(path, INCOMPLETE)
    with unclaimed(work, path):
        restore_replaced(path)
        check_replaceable_folder(path)
        make_folders(path.parent)
        remove_leftover(path, INCOMPLETE)
    try:
        file = open(work, "xb", buffering=0)  # noqa: SIM115 - closed by what writes it
    except FileExistsError:
        raise concurrent_save_error(path) from None
    if not claim(file.fileno(), PATIENCE_S) or not _is_still(work, file.fileno()):
        file.close()
        raise concurrent_save_error(path)
    held = os.dup(file.fileno())  # nothing else is known by its number meanwhile
    try:
        with ThreadedWriter(file, lasting(value), wrote) as behind:
            torch.save(value, behind)  # type: ignore[arg-type]
        if not _is_still(work, held):
            raise CheckpointError(
                f"another save to {path} has begun meanwhile, and removed what was written. What stood there is still "
                "there. Let each training save to a place of its own."
            )
        replace_atomically(work, path)
    except BaseException:
        with suppress(OSError):  # the error that made it useless says more
            if _is_still(work, held):
                remove(work)
        raise
    finally:
        release(held)
        os.close(held)


def _is_still(work: Path, held: int) -> bool:
    try:
        return os.path.samestat(os.stat(work), os.fstat(held))
    except FileNotFoundError:
        return False


def verify_archive(path: Path, part: int = 0, parts: int = 1, read: Callable[[int], None] = lambda count: None) -> None:
    """Compares one of ``parts`` about equal parts of a file with its checksums, and tells ``read`` how many bytes more
    were. A file that has none passes: in torch's older format, or saved after
    ``torch.serialization.set_crc32_options(False)``.

    Raises:
        CheckpointError: the file is damaged; says where.
    """
    with wrap_read_errors(path), open(path, "rb") as file:
        verify_open_archive(file, str(path), part, parts, read)


def verify_open_archive(file: Any, name: str, part: int, parts: int, read: Callable[[int], None], block: int = BLOCK) -> None:
    """The same of a file that is open for reading, wherever it is, by reads of so many bytes at most."""
    if not file.seek(0, 2):
        raise CheckpointError(f"{name} is empty. Use another checkpoint.")
    if not _is_archive(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if not entries or min(entry.header_offset for entry in entries):
                raise zipfile.BadZipFile("something stands before its first part, or there is none")
            names = Counter(entry.filename for entry in entries)
            if len(names) < len(entries):
                raise zipfile.BadZipFile(f"it has {names.most_common(1)[0][0][:80]!r} twice")
            if any(entry.compress_type for entry in entries):  # torch writes none, and maps what stands there
                raise zipfile.BadZipFile("it is compressed, which torch's files never are")
            summed = any(entry.CRC for entry in entries)
            for entry in _share(entries, part, parts) if summed else ():
                with archive.open(entry) as contents:
                    while data := contents.read(block):
                        read(len(data))
    except CheckpointError:  # a store's, which is a RuntimeError, too
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        LookupError,
        RuntimeError,
        ValueError,
    ) as error:  # damage shows as any
        raise CheckpointError(
            f"{name} is damaged: {error}. It was cut off or changed after it was saved. Use another checkpoint."
        ) from error


def _is_archive(file: Any) -> bool:
    """Also a part of one: its directory stands at the end, where a file that was cut off has lost it, and its beginning
    may be what is damaged."""
    file.seek(0)
    begins = file.read(4) == b"PK\x03\x04"
    return begins or zipfile.is_zipfile(file)


def _share(entries: Sequence[zipfile.ZipInfo], part: int, parts: int) -> list[zipfile.ZipInfo]:
    """Those whose middle lies in one of so many equal stretches of the file, in the order in which they lie."""
    total = 1 + max(entry.header_offset + entry.compress_size for entry in entries)
    mine = [entry for entry in entries if (entry.header_offset + entry.compress_size // 2) * parts // total == part]
    return sorted(mine, key=lambda entry: entry.header_offset)
