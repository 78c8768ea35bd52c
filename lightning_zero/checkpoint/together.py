"""What one rank cannot do, all ranks hear of: steps of a save or a load in which each rank may fail by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from lightning_zero.errors import CheckpointError
from lightning_zero.mesh import Mesh
from lightning_zero.native.watchdog import SequenceId, Watchdog

__all__ = ["Alone", "Together"]

T = TypeVar("T")

TO_COME_S, POLL_S = 10.0, 0.02
ALL = "all have come"


class Together:
    """The ranks of a mesh, step by step.

    Args:
        mesh: whose control group they speak in.
        watchdog: is told what this rank does, and what it waits for.
    """

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
    def share(self) -> tuple[int, int]:
        """This rank's number among those of its host, and how many they are: who share the work of reading what every
        host may have a copy of."""
        hosts, rank = self._mesh.hosts, self._mesh.rank
        mates = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        return mates.index(rank), len(mates)

    def begin_stage(self) -> int:
        """On all ranks: who comes to :meth:`absent` from here on comes in another stage. Gives its number."""
        self._stage += 1
        return self._stage

    def absent(self, word: str) -> str:
        """Why ranks cannot do something together after an exception; empty where they can: all have come here, with
        the same ``word``, or do so soon. The same on all that have come. Not collective: others may never come. Once
        in a stage."""
        store = self._mesh.store(f"absent/{self._stage}")
        store.set(f"{self.rank}", word)
        deadline, ranks = time.monotonic() + TO_COME_S, range(self.world_size)
        others = [f"{rank}" for rank in ranks]
        while not (late := time.monotonic() > deadline or bool(self._watchdog.native.abort_reason())):
            if store.check(others):
                break
            time.sleep(POLL_S)
        missing = [name for name in others if late and not store.check([name])]
        found = "" if missing else _differing([store.get(name).decode() for name in others])
        if missing:
            found = f"rank {', '.join(missing)} did not raise one, too, and has a part of what is to be saved"
        # Whoever is the first to decide does so for all.
        return store.compare_set("found", "", found or ALL).decode().replace(ALL, "")

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Surrounds what may take its time on this rank."""
        return self._watchdog.busy(what)

    def each(self, what: str, attempt: Callable[[], T]) -> list[T]:
        """What ``attempt`` gives on each rank, in their order; it may be pickled. Collective.

        Args:
            what: is done, after "Could not".
            attempt: this rank's part.

        Raises:
            CheckpointError: on every rank, when it has failed on one: says on which, and why.
        """
        error, mine = None, None
        with self._watchdog.busy(f"tries to {what}"):
            try:
                mine = attempt()
            except Exception as caught:  # whatever it is: the others wait, and what cannot be pickled is a TypeError
                error = caught
        told = None if error is None else _text(error)
        # An attempt may take longer than any collective, as long as it goes on.
        awaited = f"the others' attempts to {what}"
        self._watchdog.collective(awaited, SequenceId.UNCOUNTED, lambda _: self._mesh.barrier(), waits=True)
        ends = self._mesh.all_gather_values((mine, told))
        failed = {rank: text for rank, (_, text) in enumerate(ends) if text is not None}
        if failed:
            raise CheckpointError(_said(what, failed, self._mesh)) from error
        return [end for end, _ in ends]

    def first(self, what: str, attempt: Callable[[], T]) -> T:
        """What ``attempt`` gives on rank 0, which alone makes it. Collective.

        Raises:
            CheckpointError: on every rank, when it fails.
        """
        return self.each(what, lambda: attempt() if self._mesh.rank == 0 else None)[0]  # type: ignore[return-value]


class Alone(Together):
    """One process by itself."""

    def __init__(self) -> None:
        pass

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def share(self) -> tuple[int, int]:
        return 0, 1

    def busy(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def each(self, what: str, attempt: Callable[[], T]) -> list[T]:
        try:
            return [attempt()]
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"Could not {what}: {_text(error)}") from error

    def first(self, what: str, attempt: Callable[[], T]) -> T:
        return self.each(what, attempt)[0]


def _differing(words: list[str]) -> str:
    other = next((rank for rank, word in enumerate(words) if word != words[0]), None)
    return "" if other is None else f"rank 0 is {words[0]}, and rank {other} {words[other]}"


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _said(what: str, failed: dict[int, str], mesh: Mesh) -> str:
    texts = set(failed.values())
    if len(texts) == 1 and len(failed) > 1:
        ranks = "all ranks" if len(failed) == mesh.world_size else f"ranks {', '.join(map(str, failed))}"
        return f"Could not {what} ({ranks}): {texts.pop()}"
    return f"Could not {what}: " + "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
