"""Run calls that sleep for most of their time concurrently; each test takes the outcome of its own."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from tests.ranks.pool import RankPool

__all__ = ["AT_ONCE", "beside", "ranks_beside"]

AT_ONCE = 3


@contextmanager
def beside(calls: Mapping[str, Callable[[], Any]], at_once: int = AT_ONCE) -> Iterator[Callable[[str], Any]]:
    """Start the calls, in order; return a function that waits for one by name, and returns or raises its outcome."""
    with ThreadPoolExecutor(at_once) as threads:
        running = {name: threads.submit(call) for name, call in calls.items()}
        try:
            yield lambda name: running[name].result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def ranks_beside(
    calls: Sequence[Callable[[], Any]], world_size: int = 2, at_once: int = AT_ONCE, deadline: float = 60.0
) -> Iterator[Callable[[Callable[[], Any]], list[Any]]]:
    """Do the same for calls on ranks, by function: each has ranks of its own."""
    with ExitStack() as stack:
        free: queue.SimpleQueue[RankPool] = queue.SimpleQueue()
        for _ in range(at_once):
            free.put(stack.enter_context(RankPool(world_size, deadline=deadline)))

        def run(fn: Callable[[], Any]) -> list[Any]:
            pool = free.get()
            try:
                return pool.run(fn)
            finally:
                free.put(pool)

        started = {fn.__qualname__: partial(run, fn) for fn in calls}
        outcome = stack.enter_context(beside(started, at_once))
        yield lambda fn: outcome(fn.__qualname__)
