"""All that an engine does with checkpoints: what there is to save of a sharded module and its optimizers, and the
folders that ranks write and read together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.background.saver import AsyncSaver
from lightning_zero.checkpoint.full import Room, model_state, optimizer_state, shard_optimizer_state
from lightning_zero.checkpoint.halfway import Halfway
from lightning_zero.checkpoint.lateness import shows
from lightning_zero.checkpoint.opening import open_checkpoint
from lightning_zero.checkpoint.sharded.again import SavedState, fingerprint, relink_target, relink_save
from lightning_zero.checkpoint.sharded.contents import bytes_to_write
from lightning_zero.checkpoint.sharded.opened import CheckpointReader, refreshed_kind, checkpoint_kind
from lightning_zero.checkpoint.sharded.optimizers import state_by_name, state_by_number, has_parameter_names
from lightning_zero.checkpoint.sharded.plans import Plans
from lightning_zero.checkpoint.sharded.saving import save_sharded
from lightning_zero.checkpoint.sharded.values import CheckpointShard
from lightning_zero.checkpoint.sharded.writing import packed
from lightning_zero.checkpoint.telling import Show, Telling, TellingFor, untold
from lightning_zero.checkpoint.together import Together
from lightning_zero.checkpoint.unseen import Unseen
from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.errors import CheckpointError
from lightning_zero.native.watchdog import Watchdog
from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.state import StateDictHooks, ignore_bytes

__all__ = ["Checkpoints"]

ROOM = 64 << 20  # bytes: for buffers, and between values


class Checkpoints:
    """Of one engine.

    Args:
        sharder: who knows the module's parameters.
        watchdog: is told what this rank does for a checkpoint.
        module: gives the sharded module, or raises.
        tell: shows the user a line about what takes long.

    Attributes:
        hooks: of the module's ``state_dict()``.
        halfway: what a load has left that ended half way.
        show: shows a bar about what takes long, and no line; None: nobody would see it.
        together: the ranks.
        saver: of saves that go on beside training.
    """

    show: Show | None = None

    def __init__(
        self,
        sharder: Sharder,
        watchdog: Watchdog,
        module: Callable[[], nn.Module],
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._sharder, self._module, self._tell, self._moved = sharder, module, tell, watchdog.moved
        self.together = Together(sharder.mesh, watchdog)
        self.hooks = StateDictHooks(sharder)
        self.halfway = Halfway(self.hooks)
        self._plans = Plans()
        self.saver = AsyncSaver(sharder.mesh, self.together, self._plans)
        self._last: SavedState | None = None
        self._writes = 0
        sharder.sync.on_before_write = self._before_writing
        sharder.executor.before_user_writes(self._before_writing)

    def _before_writing(self) -> None:
        self._writes += 1
        self.saver.before_writing()

    # -- what there is to save

    def model_state(self, sharded: bool = False) -> dict[str, Any]:
        """The module's state dict: whole values on rank 0's CPU, and empty elsewhere; or, ``sharded``, on every rank
        its part of each. Collective."""
        if not sharded:
            total = sum(record.layout.numel * record.param.itemsize for record in self._sharder.live)
            with self._gathering("weights", total) as gathered:
                return model_state(self._module(), self.hooks, gathered)
        parts: dict[int, Tensor] = {}  # tied ones stay one
        mesh = self._sharder.mesh

        def show(record: ShardedParameter) -> Tensor:
            if record.index not in parts:
                parts[record.index] = CheckpointShard(record.layout, record.shard, mesh.shard_index, mesh.replica)
            return parts[record.index]

        with self.hooks.overriding_values(show):
            return self._module().state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer, sharded: bool = False) -> dict[str, Any]:
        """The optimizer's state dict: whole values on rank 0's CPU, in torch's own form, and empty elsewhere; or,
        ``sharded``, on every rank its part, with parameters by name. Collective."""
        if sharded:
            return state_by_name(optimizer, self._module(), self._sharder)
        what = f"the state of {type(optimizer).__name__}"
        return optimizer_state(optimizer, self._sharder, partial(self._gathering, what))

    def _gathering(self, what: str, total: int) -> Telling:
        """Tells of what rank 0 keeps: others, which keep nothing, may be through long before."""
        if self.together.rank:
            return untold(total)
        return self.telling(f"Gathering {what}", "gathered", total)

    # -- what was saved

    def local_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], room: Room) -> dict[str, Any]:
        """This rank's part of a state dict of either form, as the optimizer of shards takes it, in memory that ``room``
        gives. Not collective.

        Raises:
            ValueError: it was saved for other parameters.
        """
        if has_parameter_names(state):
            state = state_by_number(state, optimizer, self._module())
        what = f"Loading the state of {type(optimizer).__name__}"
        telling = partial(self.telling, what, "read")
        return shard_optimizer_state(dict(state), optimizer, self._sharder, room, telling)

    @contextmanager
    def loading_weights(self, path: object) -> Iterator[None]:
        """Surrounds ``load_state_dict()`` with a checkpoint's weights: how far it is, and what it leaves half done, is
        told."""
        total = sum(record.shard.nbytes for record in self._sharder.live)
        with self.halfway.weights(path), self.telling(f"Loading weights of {path}", "read", total) as read:
            self.hooks.on_loaded_bytes = read
            try:
                yield
            finally:
                self.hooks.on_loaded_bytes = ignore_bytes

    def telling(self, what: str, done: str, total: int) -> Telling:
        """Tells the user how far of ``total`` bytes it is, see there."""
        bar = None if self.show is None else self.show(what, total)
        return Telling(what, done, self._tell, bar, total, self._moved)

    @contextmanager
    def telling_for(self, what: str) -> Iterator[None]:
        """Surrounds code that does ``what`` and tells nothing, or only for a part of it."""
        moved = self._moved
        try:
            with TellingFor(what, moved) as telling:
                self._moved = telling.inside
                yield
        finally:
            self._moved = moved

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
        """Writes a sharded checkpoint, see :func:`~lightning_zero.checkpoint.sharded.saving.save_sharded`; with
        ``background``, beside what comes next, until :attr:`saver` finishes it or saves again. Collective.

        Args:
            path: see there, like the next two.
            state: nested dicts.
            rest: other things.
            background: whether to save beside what comes next.
            mark: of a state that will be saved again at once.
            again: this is the second time, if the save before had the same mark. Unless something shows that the state
                has changed, its files are linked; what is written to ``param.data`` in between would not show.

        Raises:
            CheckpointError: on every rank, when it, or the one before, could not be written; what stood there is still
                there.
        """
        self._sharder.sync.before_reading()
        last, self._last = self._last, None
        if again and last is not None and last.mark == mark and self._save_again(last, path, state, rest):
            return
        if background:
            place = self.saver.save(path, state, rest)
        else:
            self.saver.finish()
            with self._telling_of_save(path, bytes_to_write(state, self.together.rank)) as wrote:
                place = save_sharded(path, state, rest, self.together, wrote, self._plans)
        if mark is not None and not again:
            self._last = SavedState(mark, place, fingerprint(state, self.together.rank), self._writes)

    @contextmanager
    def _telling_of_save(self, path: str | Path, total: int) -> Iterator[Telling]:
        wrote = self.telling(f"Saving {path}", "written", total)
        # Stores tell nothing of copies, and of what they upload when a file is closed.
        with wrote, Unseen(lambda count: wrote(0)) if "://" in str(path) else nullcontext():
            yield wrote

    def _save_again(self, last: SavedState, path: str | Path, state: Mapping[str, Any], rest: Any) -> bool:
        """False where the state is another one, or its files cannot be linked."""
        what, rank = f"save a checkpoint to {path}", self.together.rank
        same = self.together.each(what, lambda: self._writes == last.writes and fingerprint(state, rank) == last.print)
        if not all(same):
            return False
        second = self.together.first(what, lambda: relink_target(path, last.path))
        if second is None:
            return False
        later = partial(relink_save, last.path, second)
        if not self.together.first(what, lambda: self.saver.at_end(partial(later, packed(rest), may_copy=True))):
            self.saver.finish()
            return self.together.first(what, lambda: _tried(partial(later, packed(rest))))
        return True

    def is_folder(self, path: str | Path) -> bool:
        """Whether the checkpoint there is sharded. Collective.

        Raises:
            CheckpointError: on every rank, when they see different things there.
        """
        what = f"look at {path}"
        seen = self.together.each(what, lambda: checkpoint_kind(path))
        if len(set(seen)) > 1:
            first = seen[0]
            seen = self.together.each(what, lambda: first if shows(lambda: refreshed_kind(path) == first) else checkpoint_kind(path))
        if len(set(seen)) > 1:
            other = next(rank for rank, kind in enumerate(seen) if kind != seen[0])
            raise CheckpointError(
                f"Ranks see different things at {path}: {seen[0]} on rank 0, {seen[other]} on rank {other}. "
                "Checkpoints must lie where all hosts see the same files; copy it to each, or share the folder."
            )
        return seen[0] == "folder"

    def prepare(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Begins to have memory ready for the first save beside training: for the shards, and for what the optimizers
        keep once they have stepped. Harmless when repeated."""
        if self.saver.prepared:
            return
        held = [record.shard for record in self._sharder.live]
        kept = tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
        held += [value for value in kept if isinstance(value, Tensor)]
        self.saver.prepare(sum(value.nbytes for value in held) + ROOM)

    def open(self, path: str | Path) -> CheckpointReader:
        """Opens a sharded checkpoint. Its files are compared with their checksums first, by all ranks together.
        Collective.

        Raises:
            CheckpointError: on every rank: it is no checkpoint, incomplete or damaged.
        """
        what = f"open the checkpoint {path}"
        opened: list[CheckpointReader] = []
        self.together.each(what, lambda: opened.append(open_checkpoint(str(path))))
        [folder] = opened
        saves = self.together.each(what, lambda: folder.save_id)
        if len(set(saves)) > 1:
            other = next(rank for rank, save_id in enumerate(saves) if save_id != saves[0])
            raise CheckpointError(
                f"Ranks see different checkpoints at {path}: rank 0 that of save {saves[0]}, rank {other} that of save "
                f"{saves[other]}. Checkpoints must lie where all hosts see the same files."
            )

        def compare() -> None:
            sizes = folder.sizes()
            mine = _share(sizes, *self.together.share)
            with self.telling(
                f"Comparing {path} with its checksums", "read", sum(sizes[name] for name in mine)
            ) as read:
                folder.check(mine, read)

        self.together.each(what, compare)
        return folder


def _tried(attempt: Callable[[], bool]) -> bool:
    """False where it fails: all ranks then save as always, and say what is wrong, if that is wrong, too."""
    try:
        return attempt()
    except (CheckpointError, OSError):
        return False


def _share(sizes: Mapping[str, int], part: int, parts: int) -> list[str]:
    """The files of one of ``parts`` shares with about the same to read."""
    loads, mine = [0] * parts, []
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        least = loads.index(min(loads))
        loads[least] += size
        if least == part:
            mine.append(name)
    return mine
