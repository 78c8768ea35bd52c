"""What the system is told of memory beforehand."""

from __future__ import annotations

import ctypes
import mmap

__all__ = ["advise"]


def advise(begin: int, nbytes: int, advice: int) -> None:
    """``madvise`` for all pages that these bytes lie in, of more than one page, where the system has such a call; it
    may say no.

    Args:
        begin: an address.
        advice: a number such as ``mmap.MADV_WILLNEED``.
    """
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is not None and nbytes > mmap.PAGESIZE:
        first = begin - begin % mmap.PAGESIZE
        call(ctypes.c_void_p(first), ctypes.c_size_t(begin + nbytes - first), advice)
