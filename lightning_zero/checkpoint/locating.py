"""Where a path or a URL leads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

__all__ = ["located"]


def located(path: str | Path, **options: Any) -> tuple[Any, str]:
    """fsspec's file system, and the place in it. A name with ``::`` in it, and no ``://``, is a file's: fsspec would
    take it for a chain of URLs, and write to what stands before that.

    Args:
        path: of a file of this host, or a URL.
        options: of the file system.
    """
    text = str(path)
    if "::" in text and "://" not in text:
        return LocalFileSystem(), os.path.abspath(os.path.expanduser(text))
    fs, place = url_to_fs(text, **options)
    return fs, str(place)
