"""Saves that go on beside training, one at a time.

In :meth:`AsyncSaver.save` ranks make the folder together and each begins its snapshot; then they train on. A
thread of each rank waits for its copies and its writer process; they tell each other how that ended through the
key-value store, over connections of their own, so that no collective of a thread comes between those of training. Rank
0's thread commits. All ranks have the same outcome: :meth:`AsyncSaver.finish` raises it.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_zero.checkpoint.background.outcome import Outcome
from lightning_zero.checkpoint.background.process import WriterProcess
from lightning_zero.checkpoint.background.snapshot import Kept, Snapshot
from lightning_zero.checkpoint.background.writer import Order, settings
from lightning_zero.checkpoint.sharded.contents import flattened, plan_items
from lightning_zero.checkpoint.sharded.plans import Brief, Plans
from lightning_zero.checkpoint.sharded.saving import begin_save, finish_save, paths_of
from lightning_zero.checkpoint.sharded.writing import Blob, RankFiles, packed
from lightning_zero.checkpoint.together import Together
from lightning_zero.errors import CheckpointError
from lightning_zero.mesh import Mesh

__all__ = ["AsyncSaver"]

log = logging.getLogger(__name__)

TO_END_S, ALONE_S = 30.0, 3.0


class AsyncSaver:
    """Of one rank.

    Args:
        mesh: of the ranks.
        together: the same ranks, step by step.
        plans: of all saves.
    """

    def __init__(self, mesh: Mesh, together: Together, plans: Plans) -> None:
        self._mesh, self._together, self._plans = mesh, together, plans
        self._snapshot = Snapshot(mesh.device)
        self._writer = WriterProcess()
        self._store: dist.Store | None = None
        self._saving: _Saving | None = None
        self._prepared: threading.Thread | None = None
        # A program may end without a word. This must not keep the saver alive.
        atexit.register(_end, weakref.ref(self))

    @property
    def prepared(self) -> bool:
        """Whether :meth:`prepare` was called."""
        return self._prepared is not None

    @property
    def busy(self) -> bool:
        """Whether a save goes on."""
        return self._saving is not None and self._saving.is_alive()

    @property
    def saving_to(self) -> str | None:
        """Where the save that goes on will be, as rank 0 understands it."""
        return self._saving.path if self._saving is not None and self._saving.is_alive() else None

    def prepare(self, count: int) -> None:
        """Begins to have memory for ``count`` bytes ready, so that the first save does not wait for it. Once, and not
        while a save goes on, whose copies lie in the memory that this would give back."""
        if self._prepared is None and not self.busy:
            self._prepared = threading.Thread(target=self._reserve, args=(count,), daemon=True)
            self._prepared.start()

    def _reserve(self, count: int) -> None:
        try:
            self._writer.start()
            self._snapshot.reserve(count)
        except OSError as error:  # the save itself will say so, on every rank
            log.info("No memory for a copy of what is to be saved yet: %s", error)

    def save(self, path: str | Path, state: Mapping[str, Any], rest: Any) -> str:
        """Begins a save, see :func:`~lightning_zero.checkpoint.sharded.saving.save_sharded`; waits for the one before.
        Collective.

        Returns:
            Where it will be, as rank 0 understands ``path``.

        Raises:
            CheckpointError: on every rank: the one before has failed, or this one could not begin.
        """
        self.finish()
        flat: dict[str, Any] = {}
        kept: list[Kept | Blob] = []
        rests: list[bytes] = []

        def copy() -> None:
            flat.update(flattened(state))
            if self._prepared is not None:
                self._prepared.join()
            kept.extend(self._snapshot.take(plan_items(flat, self._mesh.rank)))
            rests.append(packed(rest) if self._mesh.rank == 0 else b"")

        save = begin_save(path, self._together, copy)
        order = Order(save.path, save.save_id, self._mesh.rank, self._snapshot.memory, kept, settings())
        if self._store is None:
            self._store = self._mesh.store("checkpoints").clone()  # type: ignore[attr-defined]
        outcome = Outcome(self._mesh, self._store, save)
        paths, [packed_rest] = paths_of(flat), rests

        def finish(briefs: Sequence[Brief]) -> None:
            finish_save(save, briefs, self._plans, paths, packed_rest)
            saving.run_at_end()

        def run() -> str | None:
            error: str | None = "it was interrupted"
            try:
                error = outcome.of(lambda: self._plans.brief(self._write(order, outcome.wrote)), finish)
            finally:
                self._plans.confirm() if error is None else self._plans.forget()
            return error

        saving = self._saving = _Saving(save.path, run)
        saving.start()
        return save.path

    def at_end(self, job: Callable[[], object]) -> bool:
        """Lets ``job`` be done as a part of the save that goes on, which fails with it, once that is committed. On
        rank 0. False where it is too late for that."""
        return self._saving is not None and self._saving.at_end(job)

    def before_writing(self) -> None:
        """Must come before shards change: the device then waits for the copies that go on."""
        self._snapshot.before_writing()

    def afterwards(self, job: Callable[[], None]) -> None:
        """Does ``job``, on this rank, once the save that goes on is committed; now, where none goes on. Not at all
        where it fails."""
        if self._saving is None or not self._saving.queue(job):
            job()

    def finish(self) -> None:
        """Waits for the save that goes on, if there is one.

        Raises:
            CheckpointError: the same on every rank, once: the save has failed; what stood there is still there.
        """
        saving = self._saving
        if saving is None:
            return
        with self._together.busy("finishes a save that goes on beside training"):
            saving.join()
        self._saving = None  # not before: after Ctrl-C somebody else must wait, whose copies take the memory of these
        if saving.error is not None and saving.given_up:
            log.error("%s", saving.error)
        elif saving.error is not None:
            raise CheckpointError(saving.error)

    def give_up(self, alone: bool = False) -> None:
        """After something has failed: what goes on may end well yet, if it does so soon. How it ended is only said.
        What does not is waited for by the next save. Harmless when repeated.

        alone: another rank has failed, and will hardly do its part
        """
        within_s = ALONE_S if alone else TO_END_S
        saving = self._saving
        if saving is None or saving.given_up:
            return
        saving.given_up = True
        saving.join(within_s)
        if saving.is_alive():
            log.error("A checkpoint that was being saved when training failed was given up after %g s.", within_s)
            return
        self._saving = None
        if saving.error is not None:
            log.error("%s", saving.error)

    def close(self) -> None:
        """Gives memory and process back."""
        self.give_up()
        if self._prepared is not None:
            self._prepared.join()
        self._snapshot.close()
        self._writer.close()

    def _write(self, order: Order, wrote: Callable[[int], None]) -> RankFiles:
        self._writer.start()
        self._snapshot.wait()
        return self._writer.write(order, wrote)


def _end(reference: weakref.ref[AsyncSaver]) -> None:
    saver = reference()
    if saver is not None:
        saver.close()


class _Saving(threading.Thread):
    """Attributes:
    path: where the checkpoint will be.
    error: why it has failed, once it is over.
    given_up: how it ends is only said.
    """

    given_up = False

    def __init__(self, path: str, save: Callable[[], str | None]) -> None:
        super().__init__(name="lightning_zero-checkpoint", daemon=True)
        self.path = path
        self.error: str | None = None
        self._save = save
        self._lock = threading.Lock()
        self._jobs: list[Callable[[], None]] | None = []
        self._at_end: list[Callable[[], object]] | None = []

    def at_end(self, job: Callable[[], object]) -> bool:
        """False when it is too late."""
        with self._lock:
            if self._at_end is not None:
                self._at_end.append(job)
            return self._at_end is not None

    def run_at_end(self) -> None:
        """What was given to :meth:`at_end` so far, and until it is done."""
        while True:
            with self._lock:
                if not self._at_end:
                    self._at_end = None
                    return
                job = self._at_end.pop(0)
            job()

    def queue(self, job: Callable[[], None]) -> bool:
        """False when it is over, and the job nobody's."""
        with self._lock:
            if self._jobs is None:
                return self.error is not None  # then it is not to be done
            self._jobs.append(job)
            return True

    def run(self) -> None:
        try:
            self.error = self._save()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        del self._save  # which knows this thread: a circle would hold folder and values until Python looks for garbage
        with self._lock:
            jobs, self._jobs = self._jobs or [], None
        if self.error is None:
            for job in jobs:
                try:
                    job()
                except Exception as error:
                    log.warning("After a checkpoint was saved: %s: %s", type(error).__name__, error)
