"""A compilation makes millions of objects that stay until it is over, and Python looks through all that there are for
garbage each time they have become a quarter more: a seventh of the seconds that Dynamo and the joint graph of 48 layers
take."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["only_young_searched"]

NEVER = 1_000_000  # searches among the objects that were made last


@contextmanager
def only_young_searched() -> Iterator[None]:
    """Inside, garbage is looked for among what has been made last, as ever, and not among what has been there for
    longer: what a compilation makes stays, or is let go of at once."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], *(max(threshold, NEVER) for threshold in before[1:]))
    try:
        yield
    finally:
        gc.set_threshold(*before)
