"""What AOTAutograd keeps of a compilation for other processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache


@contextmanager
def saved_later(saves: list[Callable[[], Any]]) -> Iterator[None]:
    """Inside, nothing is written into its cache; what would do so is put into the list. What it keeps are compiled
    kernels, for which whoever writes has to wait.

    Args:
        saves: to be called within the same settings of functorch.
    """
    # Writes an entry: its key, itself, and whether others get it, too. (torch 2.11+)
    plain = AOTAutogradCache.save

    def later(*entry: Any, **named: Any) -> None:
        saves.append(partial(plain, *entry, **named))

    with patch.object(AOTAutogradCache, "save", later):
        yield
