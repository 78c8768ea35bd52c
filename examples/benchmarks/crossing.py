"""Bytes that cross hosts, whatever strategy moves them."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning as L
import torch.distributed as dist

# The argument that is whole, and how often it travels: an all-reduce's to the sums and back. Torch has renamed some.
WHOLE = {
    "all_gather_into_tensor": ("output_tensor", 1),
    "all_gather_single": ("output_tensor", 1),
    "reduce_scatter_tensor": ("input", 1),
    "reduce_scatter_single": ("input", 1),
    "all_reduce": ("tensor", 2),
}


class Crossing(L.Callback):
    """GB that each rank gets from other hosts in an optimizer step, on the average of those behind the ``warm`` first;
    hosts are ``ranks_per_host`` neighbours. Ours count for themselves. For others, torch's collectives are watched: of
    those whose ranks are on several hosts, the least that any algorithm can move."""

    def __init__(self, ranks_per_host: int, warm: int) -> None:
        self.ranks_per_host, self.warm = ranks_per_host, warm
        self.seen = 0.0  # bytes
        self.begun: float | None = None  # bytes when the first ``warm`` steps were over
        self.gb: float | None = None

    def watch(self) -> None:
        """From here on, until the process ends."""
        for name, (whole, times) in WHOLE.items():
            if hasattr(dist, name):
                setattr(dist, name, self.watched(getattr(dist, name), whole, times))

    def watched(self, collective: Callable[..., Any], whole: str, times: int) -> Callable[..., Any]:
        signature = inspect.signature(collective)

        def run(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            ranks = dist.get_process_group_ranks(given.get("group") or dist.group.WORLD)
            hosts = len({rank // self.ranks_per_host for rank in ranks})
            self.seen += times * given[whole].nbytes * (hosts - 1) / hosts
            return collective(*args, **kwargs)

        return run

    def so_far(self, trainer: L.Trainer) -> float:
        engine = getattr(trainer.strategy, "_engine", None)
        if engine is None:
            return self.seen
        counters = engine.executor.counters()
        hosts = trainer.world_size // self.ranks_per_host
        whole = sum(counters.get(name, 0) for name in ("gather_bytes_across", "reduce_bytes_across"))
        return whole * (hosts - 1) / hosts

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.warm and self.begun is None:  # not again with micro-batches of the next step
            self.begun = self.so_far(trainer)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.begun is not None and trainer.global_step > self.warm:
            self.gb = round((self.so_far(trainer) - self.begun) / (trainer.global_step - self.warm) / 1e9, 3)
