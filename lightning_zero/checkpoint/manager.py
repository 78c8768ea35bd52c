"""Checkpoints of one engine: its state dicts, and the folders that ranks write and read together.

:class:`CheckpointManager` is the entry for strategies. Its methods are collective unless they say otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
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
from lightning_zero.checkpoint.sharded.commit import (
    PlanCache,
    SavedState,
    fingerprint,
    relink_save,
    relink_target,
    save_sharded,
)
from lightning_zero.checkpoint.sharded.planner import bytes_to_write, serialize
from lightning_zero.checkpoint.sharded.reader import CheckpointReader, checkpoint_kind, open_checkpoint, refreshed_kind
from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.errors import CheckpointError
from lightning_zero.native.watchdog import Watchdog
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.sharding.state_dict import StateDictHooks, ignore_bytes

log = logging.getLogger(__name__)

EXTRA_SNAPSHOT_BYTES = 64 << 20  # for buffers, and gaps between tensors


class CheckpointManager:
    """State dicts and sharded checkpoints of one engine.

    Args:
        sharder: knows the module's parameters.
        watchdog: learns about collective steps and progress.
        module: returns the sharded module, or raises.
        print_line: shows the user a line about a long task.

    Attributes:
        hooks: of the module's ``state_dict()``.
        partial_load: records a load that has failed half-way.
        show_bar: shows a progress bar in place of lines; None: show lines.
        ranks: runs collective steps.
        saver: of async saves.
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
        self.partial_load = PartialLoad(self.hooks)
        self._plans = PlanCache()
        self.saver = AsyncSaver(sharder.mesh, self.ranks, self._plans)
        self._last_save: SavedState | None = None
        self._writes = 0
        sharder.sync.add_reader(self._before_writing)
        sharder.executor.before_user_writes(self._before_writing)

    def _before_writing(self) -> None:
        self._writes += 1
        self.saver.before_writing()

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
                shards[record.index] = CheckpointShard(record.layout, record.shard, mesh.shard_index, mesh.replica)
            return shards[record.index]

        with self.hooks.overriding_values(shard_of):
            return self._module().state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer, sharded: bool = False) -> dict[str, Any]:
        """Return the optimizer's state dict.

        Args:
            optimizer: of this engine.
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
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], allocate: AllocateFlat
    ) -> dict[str, Any]:
        """Return this rank's shards of a loaded state dict. Not collective.

        Args:
            optimizer: will load them.
            state: full or sharded, by parameter number or name.
            allocate: returns memory for the shards.

        Raises:
            ValueError: it was saved for other parameters.
        """
        if has_parameter_names(state):
            state = state_by_number(state, optimizer, self._module())
        what = f"Loading the state of {type(optimizer).__name__}"
        make_progress = partial(self.progress, what, "read")
        return shard_optimizer_state(dict(state), optimizer, self._sharder, allocate, make_progress)

    @contextmanager
    def loading_weights(self, path: object) -> Iterator[None]:
        """Surround ``load_state_dict()``: report its progress, and record a failure half-way."""
        total = sum(record.shard.nbytes for record in self._sharder.live)
        with self.partial_load.watch_weights(path), self.progress(f"Loading weights of {path}", "read", total) as read:
            self.hooks.on_loaded_bytes = read
            try:
                yield
            finally:
                self.hooks.on_loaded_bytes = ignore_bytes

    def progress(self, task: str, verb: str, total_bytes: int) -> ProgressReporter:
        """Return the reporter of a task."""
        bar = None if self.show_bar is None else self.show_bar(task, total_bytes)
        return ProgressReporter(task, verb, self._print_line, bar, total_bytes, self._report_to_ranks)

    # -- folders

    def save(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        rest: Any = None,
        background: bool = False,
        mark: Hashable = None,
        again: bool = False,
    ) -> None:
        """Write a sharded checkpoint.

        Args:
            path: see :func:`~lightning_zero.checkpoint.sharded.commit.save_sharded`, like the next two.
            state: nested dicts.
            rest: other values.
            background: save concurrently with training, until :attr:`saver` finishes it or saves again.
            mark: identifies a state that will be saved again at once.
            again: the second save of this mark. Files are linked if the state has not changed; a write to
                ``param.data`` in between is not detected.

        Raises:
            CheckpointError: on every rank: this save or the previous one has failed; the previous checkpoint remains.
        """
        self._sharder.sync.before_reading()
        last, self._last_save = self._last_save, None
        if again and last is not None and last.mark == mark and self._relink(last, path, state, rest):
            return
        if background:
            place = self.saver.save(path, state, rest)
        else:
            self.saver.finish()
            with self.progress(f"Saving {path}", "written", bytes_to_write(state, self.ranks.rank)) as on_write:
                place = save_sharded(path, state, rest, self.ranks, on_write, self._plans)
        if mark is not None and not again:
            self._last_save = SavedState(mark, place, fingerprint(state, self.ranks.rank), self._writes)

    def _relink(self, last: SavedState, path: str | Path, state: Mapping[str, Any], rest: Any) -> bool:
        """Link the files of the last save; return False if the state has changed, or files cannot be linked."""
        what, rank = f"save a checkpoint to {path}", self.ranks.rank
        same = self.ranks.run_on_all(
            what, lambda: self._writes == last.writes and fingerprint(state, rank) == last.print
        )
        if not all(same):
            return False
        second = self.ranks.run_on_rank0(what, lambda: relink_target(path, last.path))
        if second is None:
            return False
        relink = partial(relink_save, last.path, second)

        def relink_now() -> bool:
            try:
                return relink(serialize(rest))
            except (CheckpointError, OSError):  # the caller then saves as usual, and raises if that fails, too
                return False

        if not self.ranks.run_on_rank0(
            what, lambda: self.saver.add_final_job(partial(relink, serialize(rest), may_copy=True))
        ):
            self.saver.finish()
            return self.ranks.run_on_rank0(what, relink_now)
        return True

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


def _share_of_files(sizes: Mapping[str, int], part: int, parts: int) -> list[str]:
    """Return the files of one of ``parts`` shares with about equal bytes."""
    loads, mine = [0] * parts, []
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        least = loads.index(min(loads))
        loads[least] += size
        if least == part:
            mine.append(name)
    return mine


class PartialLoad:
    """Record a load that fails half-way: the module then mixes old weights with those of the checkpoint.

    Args:
        hooks: count replaced weights.

    Attributes:
        message: describes the failed load; None if there was none, or a complete one followed.
    """

    def __init__(self, hooks: StateDictHooks) -> None:
        self._hooks = hooks
        self.message: str | None = None

    @contextmanager
    def watch_weights(self, path: object) -> Iterator[None]:
        """Surround the replacement of weights."""
        before = self._hooks.loaded_bytes
        try:
            yield
        except BaseException as error:
            if self._hooks.loaded_bytes > before:
                self._record(path, error, "some weights of the module are the checkpoint's now, and some are not")
            raise
        self.message = None

    @contextmanager
    def watch_optimizers(self, path: object) -> Iterator[None]:
        """Surround the replacement of the optimizers' state, after that of all weights."""
        try:
            yield
        except BaseException as error:
            self._record(path, error, "the module's weights are the checkpoint's, and the optimizer's state is not")
            raise

    @contextmanager
    def watch_all(self, path: object) -> Iterator[None]:
        """Surround a complete load, in any order; record a failure unless :meth:`watch_weights` has."""
        before, self.message = self._hooks.loaded_bytes, None
        try:
            yield
        except BaseException:
            if self._hooks.loaded_bytes > before and self.message is None:
                with self.watch_optimizers(path):
                    raise
            raise

    def _record(self, path: object, error: BaseException, what: str) -> None:
        self.message = (
            f"Loading {path} ended half way ({type(error).__name__}): {what}. Load a checkpoint to its end, or build "
            "the module anew, before you train, evaluate or save it."
        )
        log.error("%s", self.message)
