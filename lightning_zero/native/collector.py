"""Python's garbage collector, where it would be in the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pause_gc"]


@contextmanager
def pause_gc() -> Iterator[None]:
    """Inside, it does not collect by itself. Not for long: memory in cycles stays until then."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
