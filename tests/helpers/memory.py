"""Two ways to see memory: everything the allocator does, and which gathered weights are still held by anybody."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves


@dataclass
class Allocations:
    """Address and signed size in bytes of each allocation, positive, and of each freeing, negative, in order."""

    events: list[tuple[int, int]] = field(default_factory=list)

    def totals(self, *sizes: int) -> tuple[int, int]:
        """Bytes that were allocated since the beginning and not freed: the most at once, and at the end.

        sizes: only allocations of exactly so many bytes
        """
        live: dict[int, int] = {}
        most = 0
        for begin, size in self.events:
            if size < 0:
                live.pop(begin, None)
                continue
            for other in [at for at, held in live.items() if at < begin + size and begin < at + held]:
                del live[other]
            if not sizes or size in sizes:
                live[begin] = size
                most = max(most, sum(live.values()))
        return most, sum(live.values())


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Watch the CPU allocator; the yielded object is filled at the end.

    It is blind in gloo's threads. If one of those holds the output of a collective last, that memory counts as free
    only at its next use: allow for a few outputs more than there are.
    """
    out = Allocations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield out
    path = Path(f"allocations-{torch.distributed.get_rank()}.json")
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    assert events, "the profiler saw no allocation"
    out.events = [(e["args"]["Addr"], e["args"]["Bytes"]) for e in sorted(events, key=lambda event: event["ts"])]


class Gathered:
    """The gathered weights, and the bytes of them that are still held.

    Watching costs a Python object for each storage, which counts as one more holder: do not measure while a step runs.
    """

    def __init__(self) -> None:
        self.count = 0
        self._held: list[tuple[StorageWeakRef, int]] = []

    def left(self, patience_s: float = 5.0) -> int:
        end = time.monotonic() + patience_s
        while True:
            left = sum(size for storage, size in self._held if not storage.expired())
            # gloo's threads let go of a tensor a moment after the collective is over.
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.001)

    def seen_by(self, op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            # The one kernel there is serves every device: ask for it as another one would, or we would call ourselves.
            result = op.redispatch(DispatchKeySet(DispatchKey.PrivateUse1), *args, **kwargs)
            for leaf in tree_leaves(result):
                self.count += 1
                self._held.append((StorageWeakRef(leaf.untyped_storage()), leaf.untyped_storage().nbytes()))
            return result

        return kernel


@contextmanager
def gathered_weights() -> Iterator[Gathered]:
    """Watch the results of all our ops that gather, in compiled code and elsewhere."""
    out = Gathered()
    library = torch.library.Library("lightning_zero", "IMPL")
    names = {s.name.split("::")[1] for s in torch._C._jit_get_all_schemas() if s.name.startswith("lightning_zero::")}
    for name in sorted(name for name in names if name.startswith("gather")):
        library.impl(name, out.seen_by(getattr(torch.ops.lightning_zero, name).default), "CPU")
    try:
        yield out
    finally:
        library._destroy()
