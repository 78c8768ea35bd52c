"""Run steps of a save or a load that may fail on one rank: every rank then raises the same error.

:class:`RankTasks` runs them on the ranks of a mesh, :class:`SingleProcess` in this process alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from lightning_zero.errors import CheckpointError
from lightning_zero.mesh import Mesh
from lightning_zero.native.watchdog import SequenceId, Watchdog

T = TypeVar("T")

ARRIVAL_TIMEOUT_S, POLL_S = 10.0, 0.02  # for all ranks after an exception
AGREED = "all have come"  # value in the store; an empty one would mean "undecided"


class RankTasks:
    """Collective steps of the ranks of a mesh."""

    def __init__(self, mesh: Mesh, watchdog: Watchdog) -> None:
        self._mesh, self._watchdog = mesh, watchdog
        self._stage = 0

    @property
    def rank(self) -> int:
        return self._mesh.rank

    @property
    def world_size(self) -> int:
        return self._mesh.world_size

    @property
    def host_ranks(self) -> list[int]:
        """Ranks on this rank's host, which share the work of reading."""
        hosts = self._mesh.hosts
        return [other for other, host in enumerate(hosts) if host == hosts[self.rank]]

    def begin_stage(self) -> int:
        """Begin a stage on all ranks, and return its number; see :meth:`find_disagreement`."""
        self._stage += 1
        return self._stage

    def find_disagreement(self, state: str) -> str:
        """Return why ranks cannot act together after an exception, or ``""``.

        They can if all arrive here with the same ``state``. The result is the same on all ranks that arrive. Not
        collective: other ranks may never arrive. Once in a stage.
        """
        store = self._mesh.store(f"absent/{self._stage}")
        store.set(f"{self.rank}", state)
        deadline, keys = time.monotonic() + ARRIVAL_TIMEOUT_S, [f"{rank}" for rank in range(self.world_size)]
        while not (late := time.monotonic() > deadline or bool(self._watchdog.native.abort_reason())):
            if store.check(keys):
                break
            time.sleep(POLL_S)
        missing = [key for key in keys if late and not store.check([key])]
        found = "" if missing else _first_difference([store.get(key).decode() for key in keys])
        if missing:
            found = f"rank {', '.join(missing)} did not raise one, too, and has a part of what is to be saved"
        # The first rank to decide does so for all.
        return store.compare_set("found", "", found or AGREED).decode().replace(AGREED, "")

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Report to the watchdog that this rank may take long."""
        return self._watchdog.busy(what)

    def run_on_all(self, what: str, attempt: Callable[[], T]) -> list[T]:
        """Run ``attempt`` on every rank, and return the results by rank. Collective.

        Args:
            what: completes "Could not ...".

        Raises:
            CheckpointError: on every rank, if the step failed on one; it names the rank and the reason.
        """
        error, mine = None, None
        with self._watchdog.busy(f"tries to {what}"):
            try:
                mine = attempt()
            except Exception as caught:  # any: the other ranks wait for this one
                error = caught
        text = None if error is None else error_text(error)
        # A step may take longer than the timeout of a collective, as long as it makes progress.
        waits_for = f"the others' attempts to {what}"
        self._watchdog.collective(waits_for, SequenceId.UNCOUNTED, lambda _: self._mesh.barrier(), waits=True)
        results = self._mesh.all_gather_values((mine, text))
        failed = {rank: text for rank, (_, text) in enumerate(results) if text is not None}
        if failed:
            raise CheckpointError(_failure_text(what, failed, self._mesh)) from error
        return [result for result, _ in results]

    def run_on_rank0(self, what: str, attempt: Callable[[], T]) -> T:
        """Run ``attempt`` on rank 0, and return its result on every rank. Collective."""
        return self.run_on_all(what, lambda: attempt() if self.rank == 0 else None)[0]  # type: ignore[return-value]


class SingleProcess(RankTasks):
    """One process without a process group."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        pass

    @property
    def host_ranks(self) -> list[int]:
        return [0]

    def busy(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def run_on_all(self, what: str, attempt: Callable[[], T]) -> list[T]:
        try:
            return [attempt()]
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"Could not {what}: {error_text(error)}") from error


def error_text(error: BaseException) -> str:
    """Return the message of an error of this package, or the class and message of another one."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _first_difference(states: list[str]) -> str:
    other = next((rank for rank, state in enumerate(states) if state != states[0]), None)
    return "" if other is None else f"rank 0 is {states[0]}, and rank {other} {states[other]}"


def _failure_text(what: str, failed: dict[int, str], mesh: Mesh) -> str:
    texts = set(failed.values())
    if len(texts) == 1 and len(failed) > 1:
        ranks = "all ranks" if len(failed) == mesh.world_size else f"ranks {', '.join(map(str, failed))}"
        return f"Could not {what} ({ranks}): {texts.pop()}"
    return f"Could not {what}: " + "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
