"""What torch does while it compiles a graph, and nobody asks for here."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_zero.compat.backwards import not_kept_twice
from lightning_zero.compat.fakes import without_gradients
from lightning_zero.compat.unwritten import unwritten
from lightning_zero.compile.garbage import only_young_searched

__all__ = ["sparing"]


@contextmanager
def sparing() -> Iterator[None]:
    """Inside, it leaves that undone."""
    with only_young_searched(), unwritten(), without_gradients(), not_kept_twice():
        yield
