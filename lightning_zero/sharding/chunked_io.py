"""Large reads in pieces, a few of them at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["read_in_chunks"]


def read_in_chunks(total: int, block: int, most: int, read: Callable[[int, int], None]) -> None:
    """Calls ``read(begin, end)`` for pieces of at most ``block`` bytes of all ``total``, by at most so many threads;
    returns, or raises what one has raised, when all have ended: a thread that goes on would write into memory that is
    somebody else's by then."""
    pieces = [(begin, min(begin + block, total)) for begin in range(0, total, block)]
    if len(pieces) <= 1:
        read(0, total)
        return
    with ThreadPoolExecutor(min(most, len(pieces))) as threads:
        ends = [threads.submit(read, *piece) for piece in pieces]
    for end in ends:
        end.result()
