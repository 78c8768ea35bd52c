"""Which gathered weights are alive: their storages are watched from the moment somebody hands them out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watched:
    """Storages that were seen: how many, and how many bytes of them were alive at once at most."""

    def __init__(self) -> None:
        self.count = 0
        self.most_bytes = 0
        self._alive: list[tuple[StorageWeakRef, int]] = []

    def saw(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.count += 1
        self._alive.append((StorageWeakRef(storage), storage.nbytes()))
        if self._bytes() > self.most_bytes:
            # gloo's threads let go of a tensor a moment after the collective is over.
            self.most_bytes = max(self.most_bytes, self._settled(self.most_bytes, 0.02))

    def left(self) -> int:
        """Bytes still alive."""
        return self._settled(0, 5.0)

    def _bytes(self) -> int:
        self._alive = [(ref, size) for ref, size in self._alive if not ref.expired()]
        return sum(size for _, size in self._alive)

    def _settled(self, enough: int, patience_s: float) -> int:
        end = time.monotonic() + patience_s
        while (found := self._bytes()) > enough and time.monotonic() < end:
            time.sleep(0.001)
        return found


@contextmanager
def gathered_weights() -> Iterator[Watched]:
    """Watches what every op of ours that gathers returns, in compiled code and elsewhere."""
    out = Watched()
    library = torch.library.Library("lightning_zero", "IMPL")
    names = {s.name.split("::")[1] for s in torch._C._jit_get_all_schemas() if s.name.startswith("lightning_zero::")}
    for name in sorted(name for name in names if name.startswith("gather")):
        library.impl(name, _seen_by(out, getattr(torch.ops.lightning_zero, name).default), "CPU")
    try:
        yield out
    finally:
        library._destroy()


def _seen_by(watched: Watched, op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        # The one kernel there is serves every device: ask for it as another one would, or we would call ourselves.
        result = op.redispatch(DispatchKeySet(DispatchKey.PrivateUse1), *args, **kwargs)
        for leaf in tree_leaves(result):
            watched.saw(leaf)
        return result

    return kernel


class Casts(TorchDispatchMode):
    """Watches the results of casts that have some number of elements and dtype. Only for code that is not compiled."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.numel, self.dtype = numel, dtype
        self.watched = Watched()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == self.dtype and out.numel() == self.numel:
            self.watched.saw(out)
        return out
