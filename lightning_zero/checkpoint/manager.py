"""Checkpoints of one engine: its state dicts, and the folders that ranks write and read together.

:class:`CheckpointManager` is the entry for strategies. Its methods are collective unless they say otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.async_save.saver import AsyncSaver
from lightning_zero.checkpoint.atomic import becomes_visible
from lightning_zero.checkpoint.full_checkpoint import model_state
from lightning_zero.checkpoint.optimizer_state import (
    AllocateFlat,
    FindStored,
    has_parameter_names,
    optimizer_state,
    shard_optimizer_state,
    state_by_name,
    state_by_number,
)
from lightning_zero.checkpoint.progress_reporter import ProgressReporter, ShowBar, silent_progress
from lightning_zero.checkpoint.rank_tasks import RankTasks
from lightning_zero.checkpoint.remote_files import ScratchFolder
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointShard
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.checkpoint.sharded.planner import bytes_to_write
from lightning_zero.checkpoint.sharded.reader import CheckpointReader, checkpoint_kind, open_checkpoint, refreshed_kind
from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.errors import CheckpointError
from lightning_zero.mesh import Mesh
from lightning_zero.native.watchdog import Watchdog
from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.param_record import ShardedParameter, gather_full
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.sharding.state_dict import StateDictHooks, ignore_bytes

log = logging.getLogger(__name__)

EXTRA_SNAPSHOT_BYTES = 64 << 20  # for buffers, and gaps between tensors


class CheckpointManager:
    """State dicts and sharded checkpoints of one engine.

    Args:
        print_line: shows the user a line about a long task.

    Attributes:
        show_bar: shows a progress bar in place of lines; None: show lines.
    """

    show_bar: ShowBar | None = None

    def __init__(
        self,
        sharder: Sharder,
        watchdog: Watchdog,
        module: Callable[[], nn.Module],
        print_line: Callable[[str], None] | None = None,
    ) -> None:
        self._sharder, self._module = sharder, module
        self._print_line, self._report_to_ranks = print_line, watchdog.moved
        self.ranks = RankTasks(sharder.mesh, watchdog)
        self.hooks = StateDictHooks(sharder)
        self.saver = AsyncSaver(sharder.mesh, self.ranks)
        sharder.sync.add_reader(self.saver.before_writing)
        sharder.executor.before_user_writes(self.saver.before_writing)

    # -- state dicts

    def model_state(self, sharded: bool = False) -> dict[str, Any]:
        """Return the module's state dict.

        Args:
            sharded: return this rank's shards on every rank, instead of full values on rank 0's CPU.
        """
        if not sharded:
            total = sum(record.layout.numel * record.param.itemsize for record in self._sharder.live)
            with self._gather_progress("weights", total) as on_gather:
                return model_state(self._module(), self.hooks, on_gather)
        shards: dict[int, Tensor] = {}  # tied parameters stay one tensor
        mesh = self._sharder.mesh

        def shard_of(record: ShardedParameter) -> Tensor:
            if record.index not in shards:
                shards[record.index] = _checkpoint_shard(record, mesh)
            return shards[record.index]

        with self.hooks.overriding_values(shard_of):
            return self._module().state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer, sharded: bool = False) -> dict[str, Any]:
        """Return the optimizer's state dict.

        Args:
            sharded: return this rank's shards by parameter name on every rank, instead of full values on rank 0's CPU
                by parameter number.
        """
        if sharded:
            return state_by_name(optimizer, self._module(), self._sharder)
        what = f"the state of {type(optimizer).__name__}"
        return optimizer_state(optimizer, self._sharder, partial(self._gather_progress, what))

    def _gather_progress(self, what: str, total: int) -> ProgressReporter:
        # Only rank 0 keeps values; the other ranks may be done long before.
        if self.ranks.rank:
            return silent_progress(total)
        return self.progress(f"Gathering {what}", "gathered", total)

    def local_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        allocate: AllocateFlat,
        find_stored: FindStored,
    ) -> dict[str, Any]:
        """Return this rank's shards of a loaded state dict. Not collective."""
        if has_parameter_names(state):
            state = state_by_number(state, optimizer, self._module())
        what = f"Loading the state of {type(optimizer).__name__}"
        make_progress = partial(self.progress, what, "read")
        return shard_optimizer_state(dict(state), optimizer, self._sharder, allocate, make_progress, find_stored)

    @contextmanager
    def loading_weights(self, path: object) -> Iterator[None]:
        """Report the progress of ``load_state_dict()`` within the context."""
        total = sum(record.shard.nbytes for record in self._sharder.live)
        with self.progress(f"Loading weights of {path}", "read", total) as read:
            self.hooks.on_loaded_bytes = read
            try:
                yield
            finally:
                self.hooks.on_loaded_bytes = ignore_bytes

    def progress(self, task: str, verb: str, total_bytes: int) -> ProgressReporter:
        bar = None if self.show_bar is None else self.show_bar(task, total_bytes)
        return ProgressReporter(task, verb, self._print_line, bar, total_bytes, self._report_to_ranks)

    # -- folders

    def save(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        rest: Any = None,
        background: bool = False,
    ) -> None:
        """Write a sharded checkpoint.

        Args:
            background: save concurrently with training, until :attr:`saver` finishes it or saves again.

        Raises:
            CheckpointError: on every rank: this save or the previous one has failed; the previous checkpoint remains.
        """
        self._sharder.sync.before_reading()
        if background:
            self.saver.save(path, state, rest)
        else:
            self.saver.finish()
            with self.progress(f"Saving {path}", "written", bytes_to_write(state, self.ranks.rank)) as on_write:
                save_sharded(path, state, rest, self.ranks, on_write)

    def is_folder(self, path: str | Path) -> bool:
        """Return True if the checkpoint at ``path`` is sharded.

        Raises:
            CheckpointError: on every rank, if ranks see different things.
        """
        what = f"look at {path}"
        seen = self.ranks.run_on_all(what, lambda: checkpoint_kind(path))
        if len(set(seen)) > 1:
            first = seen[0]

            def kind_again() -> str:
                visible = becomes_visible(lambda: refreshed_kind(path) == first)
                return first if visible else checkpoint_kind(path)

            seen = self.ranks.run_on_all(what, kind_again)
        if len(set(seen)) > 1:
            other = next(rank for rank, kind in enumerate(seen) if kind != seen[0])
            raise CheckpointError(
                f"Ranks see different things at {path}: {seen[0]} on rank 0, {seen[other]} on rank {other}. "
                "Checkpoints must be stored where all hosts see the same files; copy it to each, or share the folder."
            )
        return seen[0] == "folder"

    def prepare(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Allocate memory for the first async save of the shards and of the optimizers' state. Idempotent."""
        if self.saver.prepared:
            return
        tensors = [record.shard for record in self._sharder.live]
        states = tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
        tensors += [value for value in states if isinstance(value, Tensor)]
        self.saver.prepare(sum(value.nbytes for value in tensors) + EXTRA_SNAPSHOT_BYTES)

    def open(self, path: str | Path) -> CheckpointReader:
        """Open a sharded checkpoint. The ranks of a host share comparing, and downloading, its files.

        Raises:
            CheckpointError: on every rank: it is no checkpoint, or incomplete or damaged.
        """
        what = f"open the checkpoint {path}"
        readers: list[CheckpointReader] = []
        self.ranks.run_on_all(what, lambda: readers.append(open_checkpoint(str(path))))
        [reader] = readers
        saves = self.ranks.run_on_all(what, lambda: reader.save_id)
        if len(set(saves)) > 1:
            other = next(rank for rank, save_id in enumerate(saves) if save_id != saves[0])
            raise CheckpointError(
                f"Ranks see different checkpoints at {path}: rank 0 that of save {saves[0]}, rank {other} that of save "
                f"{saves[other]}. Checkpoints must be stored where all hosts see the same files."
            )
        if reader.is_remote:
            reader.scratch = ScratchFolder.shared(self.ranks)

        def check() -> None:
            sizes, host = reader.sizes(), self.ranks.host_ranks
            mine = _share_of_files(sizes, host.index(self.ranks.rank), len(host))
            total = sum(sizes[name] for name in mine)
            with self.progress(f"Comparing {path} with its checksums", "read", total) as on_read:
                reader.check(mine, on_read)

        self.ranks.run_on_all(what, check)
        return reader


def _checkpoint_shard(record: ShardedParameter, mesh: Mesh) -> CheckpointShard:
    """Return this rank's values.

    Collective for a packed weight, which is computed from all ranks' codes.
    """
    layout, shard = record.layout, record.shard
    if record.format is not None:
        layout = ShardLayout.from_shape(record.shape, record.dtype, layout.world_size)
        shard = layout.part(gather_full(record), mesh.shard_index).cpu()
    return CheckpointShard(layout, shard, mesh.shard_index, mesh.replica)


def _share_of_files(sizes: Mapping[str, int], part: int, parts: int) -> list[str]:
    """Return the files of one of ``parts`` shares with about equal bytes."""
    loads, mine = [0] * parts, []
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        least = loads.index(min(loads))
        loads[least] += size
        if least == part:
            mine.append(name)
    return mine
