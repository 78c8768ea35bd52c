"""Threads of this process as ranks, for saving and opening checkpoints.

Processes take a second, and threads a few milliseconds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.checkpoint.manager import CheckpointManager
from lightning_zero.checkpoint.rank_tasks import RankTasks
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointShard
from lightning_zero.sharding.layout import ShardLayout
from tests.helpers.simulated_clock import SimulatedClock

__all__ = ["checkpoints_of", "on_ranks", "sharded_state", "values_of"]

PATIENCE_S = 20.0  # otherwise a rank waits for one that will not arrive: the hang that must not happen

VALUES = {"up.weight": (33, 17), "up.bias": (33,), "down.weight": (5, 33), "scale": ()}


class _Meeting:
    """A barrier of threads, for any number of uses.

    A thread that waits for one that has ended gets an error, as from a process that is gone.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rounds: list[dict[int, Any]] = []
        self.over: set[int] = set()
        self.changed = threading.Condition()

    def all_gather_values(self, rank: int, turn: int, value: Any) -> list[Any]:
        with self.changed:
            if turn == len(self.rounds):
                self.rounds.append({})
            found = self.rounds[turn]
            found[rank] = value
            self.changed.notify_all()
            came = self.changed.wait_for(lambda: len(found) == self.world_size or self.over - set(found), PATIENCE_S)
            if not came or len(found) < self.world_size:
                raise ConnectionError(f"rank {rank} waits for ranks that do not come, in turn {turn}")
            return [found[other] for other in range(self.world_size)]

    def end(self, rank: int) -> None:
        with self.changed:
            self.over.add(rank)
            self.changed.notify_all()


def on_ranks(world_size: int, attempt: Callable[[RankTasks], Any], clock: SimulatedClock | None = None) -> list[Any]:
    """Return the result of ``attempt``, or its error, on each rank. ``clock``: by which ranks sleep, if they do."""
    meeting, shared = _Meeting(world_size), dist.HashStore()
    watchdog: Any = SimpleNamespace(
        busy=lambda what: nullcontext(),
        collective=lambda *told, **waits: None,
        native=SimpleNamespace(abort_reason=lambda: ""),
    )

    def one(rank: int) -> Any:
        turns = itertools.count()
        mesh: Any = SimpleNamespace(
            hosts=(0,) * world_size,
            rank=rank,
            world_size=world_size,
            store=lambda prefix: dist.PrefixStore(prefix, shared),
            all_gather_values=lambda value: meeting.all_gather_values(rank, next(turns), value),
        )
        try:
            return attempt(RankTasks(mesh, watchdog))
        except BaseException as error:
            return error
        finally:
            meeting.end(rank)

    return (clock or SimulatedClock()).run([partial(one, rank) for rank in range(world_size)])


def checkpoints_of(together: RankTasks) -> Any:
    """Return their ``CheckpointManager``, without an engine, for readers."""
    found = CheckpointManager.__new__(CheckpointManager)
    found.ranks, found._print_line, found._report_to_ranks = together, None, None
    return found


def values_of(seed: float) -> dict[str, torch.Tensor]:
    """Whole values of a small model."""
    return {
        key: seed + torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 7 for key, shape in VALUES.items()
    }


def sharded_state(rank: int, world_size: int, seed: float) -> dict[str, Any]:
    """This rank's part of :func:`values_of`, and moments of an optimizer, as a strategy gives it to be saved."""
    whole: Mapping[str, torch.Tensor] = values_of(seed)
    parts = {}
    for key, value in whole.items():
        layout = ShardLayout.from_shape(value.shape, value.dtype, world_size)
        parts[key] = CheckpointShard(layout, layout.part(value, rank), rank)
    moments = {key: {"step": torch.tensor(4.0), "exp_avg": part} for key, part in parts.items()}
    groups = [{"lr": 0.1, "params": list(parts)}]
    return {"state_dict": parts, "optimizer_0": {"state": moments, "param_groups": groups}}
