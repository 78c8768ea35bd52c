"""What torch does while it compiles a graph, and nobody asks for here."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from lightning_zero.compat.backwards import skip_backward_copies
from lightning_zero.compat.fakes import skip_gradient_fakes
from lightning_zero.compat.skipped_text import unwritten
from lightning_zero.compile.garbage import only_young_searched
from lightning_zero.compile.layer_dedup import fast_layer_call_fakes

__all__ = ["sparing"]


@contextmanager
def sparing(backward_at_once: bool) -> Iterator[None]:
    """Inside, it leaves that undone.

    Args:
        backward_at_once: a backward is compiled with its forward, or nothing is. Otherwise torch goes back to the copy.
    """
    kept = skip_backward_copies() if backward_at_once else nullcontext()
    with only_young_searched(), unwritten(), skip_gradient_fakes(), fast_layer_call_fakes(), kept:
        yield
