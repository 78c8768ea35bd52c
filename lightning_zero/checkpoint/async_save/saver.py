"""Saves that run concurrently with training, one at a time.

In :meth:`AsyncSaver.save` ranks make the folder together and each begins its snapshot; then they train on. A thread of
each rank waits for its copies and its writer process. The threads exchange results through the key-value store, over
their own connections, so that no collective of a thread is interleaved with those of training; rank 0's thread commits.
All ranks get the same result, and :meth:`AsyncSaver.finish` raises it.

The texts in the store are JSON and not pickles: all that can reach the store may write to it.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_zero.checkpoint.async_save.snapshot import Snapshot, SnapshotChunk
from lightning_zero.checkpoint.async_save.writer_process import WriteRequest, WriterProcess, fsspec_settings
from lightning_zero.checkpoint.rank_tasks import RankTasks, error_text
from lightning_zero.checkpoint.sharded.commit import PendingSave, RankSummary, begin_save, discard, finish_save
from lightning_zero.checkpoint.sharded.planner import PickledItem, flatten_state, paths_of, plan_items, serialize
from lightning_zero.checkpoint.sharded.writer import RankFiles
from lightning_zero.config.text import format_bytes
from lightning_zero.errors import CheckpointError
from lightning_zero.mesh import Mesh

log = logging.getLogger(__name__)

GIVE_UP_S, GIVE_UP_ALONE_S = 30.0, 3.0  # after an exception on this rank; on another one, which will hardly finish
PART_TIMEOUT_S = 10.0
POLL_S = 0.05  # a wait in the store would block its other users
PROGRESS_INTERVAL_S = 0.5


class AsyncSaver:
    """Async saves of one rank."""

    def __init__(self, mesh: Mesh, ranks: RankTasks) -> None:
        self._mesh, self._ranks = mesh, ranks
        self._snapshot = Snapshot(mesh.device)
        self._writer = WriterProcess()
        self._store: dist.Store | None = None
        self._saving: _SaveThread | None = None
        self._preparing: threading.Thread | None = None
        # For a program that ends without close(). Must not keep the saver alive.
        atexit.register(_close, weakref.ref(self))

    @property
    def prepared(self) -> bool:
        """True after :meth:`prepare`."""
        return self._preparing is not None

    @property
    def busy(self) -> bool:
        """True during a save."""
        return self._saving is not None and self._saving.is_alive()

    @property
    def saving_to(self) -> str | None:
        """The absolute path of the current save on rank 0, or None."""
        return self._saving.path if self._saving is not None and self._saving.is_alive() else None

    def prepare(self, count: int) -> None:
        """Allocate memory for ``count`` bytes in a thread, ahead of the first save. Idempotent."""
        # Not during a save: reserve() would free the memory that holds its copies.
        if self._preparing is None and not self.busy:
            self._preparing = threading.Thread(target=self._reserve, args=(count,), daemon=True)
            self._preparing.start()

    def _reserve(self, count: int) -> None:
        try:
            self._writer.start()
            self._snapshot.reserve(count)
        except OSError as error:  # the save raises it on every rank
            log.debug("Async save: no memory for a snapshot yet (reason=%s)", error)

    def save(self, path: str | Path, state: Mapping[str, Any], rest: Any) -> str:
        """Begin a save, after the previous one has ended. Collective.

        Returns:
            The absolute path on rank 0.

        Raises:
            CheckpointError: on every rank: the previous save has failed, or this one could not begin.
        """
        self.finish()
        flat: dict[str, Any] = {}
        items: list[SnapshotChunk | PickledItem] = []
        rests: list[bytes] = []

        def copy() -> None:
            flat.update(flatten_state(state))
            if self._preparing is not None:
                self._preparing.join()
            items.extend(self._snapshot.take(plan_items(flat, self._mesh.rank)))
            rests.append(serialize(rest) if self._mesh.rank == 0 else b"")

        save = begin_save(path, self._ranks, copy)
        request = WriteRequest(
            save.path, save.save_id, self._mesh.rank, self._snapshot.memory, items, fsspec_settings()
        )
        if self._store is None:
            self._store = self._mesh.store("checkpoints").clone()  # type: ignore[attr-defined]
        outcome = SaveOutcome(self._mesh, self._store, save)
        paths, [serialized_rest] = paths_of(flat), rests

        def finish(summaries: Sequence[RankSummary]) -> None:
            finish_save(save, summaries, paths, serialized_rest, outcome.add_progress)

        def run() -> str | None:
            return outcome.run(lambda: RankSummary.of(self._write(request, outcome.add_progress)), finish)

        self._saving = _SaveThread(save.path, run)
        self._saving.start()
        return save.path

    def before_writing(self) -> None:
        """Make the device wait for the copies of the current save. Call before shards change."""
        self._snapshot.before_writing()

    def run_after_commit(self, job: Callable[[], None]) -> None:
        """Run ``job`` on this rank after the current save has succeeded, or now if there is none."""
        if self._saving is None or not self._saving.queue(job):
            job()

    def finish(self) -> None:
        """Wait for the current save.

        Raises:
            CheckpointError: the same on every rank, once: it has failed; the previous checkpoint remains.
        """
        saving = self._saving
        if saving is None:
            return
        with self._ranks.busy("finishes a save that goes on beside training"):
            saving.join()
        self._saving = None  # after join(): if that is interrupted, the next save must wait for the snapshot's memory
        if saving.error is not None and saving.given_up:
            log.error("%s", saving.error)
        elif saving.error is not None:
            raise CheckpointError(saving.error)

    def give_up(self, alone: bool = False) -> None:
        """Wait a limited time for the current save after an exception, and log its error. Idempotent.

        If it has not ended then, the next save waits for it.

        Args:
            alone: another rank has failed, and will hardly do its part.
        """
        timeout_s = GIVE_UP_ALONE_S if alone else GIVE_UP_S
        saving = self._saving
        if saving is None or saving.given_up:
            return
        saving.given_up = True
        saving.join(timeout_s)
        if saving.is_alive():
            log.error("A checkpoint that was being saved when training failed was given up after %g s.", timeout_s)
            return
        self._saving = None
        if saving.error is not None:
            log.error("%s", saving.error)

    def close(self) -> None:
        """Free the memory, and end the writer process."""
        self.give_up()
        if self._preparing is not None:
            self._preparing.join()
        self._snapshot.close()
        self._writer.close()

    def _write(self, request: WriteRequest, on_write: Callable[[int], None]) -> RankFiles:
        self._writer.start()
        self._snapshot.wait()
        return self._writer.write(request, on_write)


def _close(reference: weakref.ref[AsyncSaver]) -> None:
    saver = reference()
    if saver is not None:
        saver.close()


class _SaveThread(threading.Thread):
    """One save.

    Attributes:
        error: why it has failed, after it has ended.
        given_up: log the error instead of raising it.
    """

    given_up = False

    def __init__(self, path: str, save: Callable[[], str | None]) -> None:
        super().__init__(name="lightning_zero-checkpoint", daemon=True)
        self.path = path
        self.error: str | None = None
        self._save = save
        self._lock = threading.Lock()
        self._jobs: list[Callable[[], None]] | None = []

    def queue(self, job: Callable[[], None]) -> bool:
        """Queue a job; return False if the save has succeeded, and the caller must run it."""
        with self._lock:
            if self._jobs is None:
                return self.error is not None  # after a failed save the job must not run
            self._jobs.append(job)
            return True

    def run(self) -> None:
        try:
            self.error = self._save()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        del self._save  # breaks a reference cycle, which would keep the folder and the values
        with self._lock:
            jobs, self._jobs = self._jobs or [], None
        if self.error is None:
            for job in jobs:
                try:
                    job()
                except Exception as error:
                    log.warning("After a checkpoint was saved: %s: %s", type(error).__name__, error)


class SaveOutcome:
    """Agree on the result of one save through the key-value store.

    Ranks wait for each other as long as one of them makes progress, and the mesh's timeout longer.
    """

    def __init__(self, mesh: Mesh, store: dist.Store, save: PendingSave) -> None:
        self._mesh, self._store, self._save = mesh, store, save
        self._moves, self._moved_at, self._looked_at = -1, math.inf, -math.inf

    def add_progress(self, count: int) -> None:
        """Publish that this rank's writer makes progress, and has written ``count`` bytes. Not thread-safe."""
        self._store.add(self._key(f"bytes {self._mesh.rank}"), count)
        self._store.add(self._key("moves"), 1)

    def run(self, write: Callable[[], RankSummary], finish: Callable[[Sequence[RankSummary]], None]) -> str | None:
        """Do this rank's part, and wait for the other ranks.

        Returns:
            Why the save has failed; None if it has succeeded.
        """
        mine: RankSummary | str
        try:
            mine = write()
        except Exception as error:
            mine = error_text(error)
        self._publish(self._mesh.rank, mine)
        if self._mesh.rank == 0:
            self._publish("end", self._end(finish))
        found = self._wait("end", PART_TIMEOUT_S)  # longer than rank 0 waits, which says for which rank it waited
        self._part()
        return found if isinstance(found, str) else None

    def _part(self) -> None:
        """Keep rank 0, whose process may serve the store, until the other ranks have the result."""
        self._publish(f"knows {self._mesh.rank}", None)
        if self._mesh.rank == 0:
            deadline = time.monotonic() + PART_TIMEOUT_S
            others = [self._key(f"knows {rank}") for rank in range(1, self._mesh.world_size)]
            while others and not self._store.check(others) and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def _end(self, finish: Callable[[Sequence[RankSummary]], None]) -> str | None:
        ends = [self._wait(rank) for rank in range(self._mesh.world_size)]
        summaries = [end for end in ends if isinstance(end, RankSummary)]
        if len(summaries) < len(ends):
            failed = "; ".join(
                f"rank {rank}: {end}" for rank, end in enumerate(ends) if not isinstance(end, RankSummary)
            )
            discard(self._save.folder)
            return f"Could not {self._save.what}: {failed}"
        self.add_progress(0)  # the other ranks' timeouts begin here
        try:
            finish(summaries)
        except Exception as error:
            discard(self._save.folder)
            return f"Could not {self._save.what}: rank 0: {error_text(error)}"
        for rank in range(self._mesh.world_size):
            self._store.delete_key(self._key(rank))
            self._store.delete_key(self._key(f"bytes {rank}"))
        return None

    def _publish(self, key: object, value: RankSummary | str | None) -> None:
        kind, text = ("summary", value.to_text()) if isinstance(value, RankSummary) else ("text", value)
        self._store.set(self._key(key), json.dumps([kind, text]))

    def _wait(self, key: object, longer_s: float = 0.0) -> RankSummary | str | None:
        while not self._store.check([self._key(key)]):
            if self._seconds_without_progress() > self._mesh.timeout_s + longer_s:
                return self._timeout_text(key)
            time.sleep(POLL_S)
        try:
            kind, text = json.loads(self._store.get(self._key(key)))
            return RankSummary.from_text(text) if kind == "summary" else None if text is None else str(text)
        except (ValueError, TypeError, RecursionError, CheckpointError) as error:
            return f"what it has told cannot be read ({error})"

    def _seconds_without_progress(self) -> float:
        """Return the seconds since any rank has published progress, counted over all waits of this object."""
        now = time.monotonic()
        if now - self._looked_at >= PROGRESS_INTERVAL_S:
            self._looked_at, before, self._moves = now, self._moves, self._store.add(self._key("moves"), 0)
            self._moved_at = now if self._moves != before else self._moved_at
        return now - self._moved_at

    def _timeout_text(self, key: object) -> str:
        if not isinstance(key, int):  # rank 0 has not published its result, so name the ranks that it waits for
            ranks = [rank for rank in range(self._mesh.world_size) if not self._store.check([self._key(rank)])]
            why = "; ".join(f"rank {rank}: {self._timeout_text(rank)}" for rank in ranks)
            return f"Could not {self._save.what}: {why or 'rank 0 has all files, and makes no checkpoint of them'}"
        text = f"it has not ended, and no rank wrote anything more within the timeout of {self._mesh.timeout_s:.0f} s"
        return f"{text}; its writer was at {format_bytes(self._store.add(self._key(f'bytes {key}'), 0))}"

    def _key(self, key: object) -> str:
        return f"{self._save.save_id}/{key}"
