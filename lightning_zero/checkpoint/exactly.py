"""Removes, copies and moves what has exactly this name, where only fsspec reaches. What fsspec does with several files
at once takes names for patterns: it would remove ``x1.ckpt``, another checkpoint, for ``x[1].ckpt``."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import Any

from fsspec.spec import AbstractFileSystem

from lightning_zero.checkpoint.atomic import REPLACED

__all__ = ["copy_file", "move_file", "remove_tree", "remove_within"]

BLOCK = 16 << 20  # bytes


def remove_tree(fs: Any, place: str) -> None:
    """A file, a folder with all that is in it, or both: object stores may have both under one name.

    Raises:
        FileNotFoundError: nothing is there.
    """
    if not _is_pattern(place):  # then object stores remove many at once
        fs.rm(place, recursive=True)
        return
    if not fs.exists(place):
        raise FileNotFoundError(place)
    remove_within(fs, place)
    fs.invalidate_cache()
    if fs.isfile(place):
        fs.rm_file(place)


def remove_within(fs: Any, place: str) -> None:
    """A folder, and no object of the same name."""
    fs.invalidate_cache()
    inside = fs.find(place, withdirs=True, detail=True)
    for name, about in sorted(inside.items(), reverse=True):  # what is in a folder comes after it
        if name.rstrip("/") == place:
            continue
        if about["type"] == "directory":
            _remove_folder(fs, name)
        else:
            fs.rm_file(name)
    _remove_folder(fs, place)


def copy_file(fs: Any, one: str, other: str) -> None:
    """Through this host where the file system cannot."""
    try:
        fs.cp_file(one, other)
    except NotImplementedError:
        with fs.open(one, "rb") as given, fs.open(other, "wb") as copy:
            shutil.copyfileobj(given, copy, BLOCK)


def move_file(fs: Any, one: str, other: str) -> None:
    """In place of a file that stands there. Where this fails, that stays.

    Raises:
        OSError: the file system does not rename it.
    """
    if type(fs).mv is AbstractFileSystem.mv:
        copy_file(fs, one, other)
        fs.rm_file(one)
        return
    if not fs.exists(other):
        _rename(fs, one, other)
        return
    refused: Exception | None = None
    try:
        fs.mv(one, other)
    except Exception as error:  # stores raise their own
        refused = error
    if not _is_there(fs, one):
        return
    # Not all replace what stands there: SMB raises, and WebHDFS says no in an answer that fsspec does not read.
    if not _is_there(fs, other):
        raise refused or _not_renamed(one, other)
    old = f"{other}{REPLACED}"
    if _is_there(fs, old):
        fs.rm_file(old)
    _rename(fs, other, old)
    try:
        _rename(fs, one, other)
    except BaseException:
        _rename(fs, old, other)
        raise
    fs.rm_file(old)


def _rename(fs: Any, one: str, other: str) -> None:
    fs.mv(one, other)
    if _is_there(fs, one):
        raise _not_renamed(one, other)


def _is_there(fs: Any, place: str) -> bool:
    fs.invalidate_cache()
    return bool(fs.exists(place))


def _not_renamed(one: str, other: str) -> OSError:
    return OSError(f"the file system has not renamed {one} to {other}, and does not say why")


def _remove_folder(fs: Any, name: str) -> None:
    """Where there are folders, which others may have put something into meanwhile."""
    with suppress(OSError, NotImplementedError):
        fs.rmdir(name)


def _is_pattern(place: str) -> bool:
    return any(sign in place for sign in "*?[")
