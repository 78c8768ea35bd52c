"""Cache entries that AOTAutograd writes for other processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_zero.compat.lookup import private
from lightning_zero.compat.patches import Patch, swap_attribute

# AOTAutograd's cache of compiled graphs. (torch 2.11+)
AOTAutogradCache = private("torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache")

__all__ = ["DEFERRED_KERNELS", "defer_cache_saves"]

DEFERRED_KERNELS = Patch(
    "kernels are compiled while the next graphs are lowered",
    {
        # Generated code waits for its kernels. (torch 2.11+)
        "torch._inductor.async_compile.AsyncCompile.wait": "self, scope",
        # Writes an entry: its key, itself, and whether others get it, too. (torch 2.11+)
        "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache.save": "key, entry, remote",
    },
)


@DEFERRED_KERNELS
@contextmanager
def defer_cache_saves(saves: list[Callable[[], Any]]) -> Iterator[None]:
    """Inside, nothing is written into its cache; what would do so is put into the list. What it keeps are compiled
    kernels, for which whoever writes has to wait.

    Args:
        saves: to be called within the same settings of functorch.
    """
    plain = AOTAutogradCache.save

    def later(*entry: Any, **named: Any) -> None:
        saves.append(partial(plain, *entry, **named))

    with swap_attribute(AOTAutogradCache, "save", later):
        yield
