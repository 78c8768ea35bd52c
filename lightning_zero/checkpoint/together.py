"""What one rank cannot do, all ranks hear of: steps of a save or a load in which each rank may fail by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from lightning_zero.errors import CheckpointError
from lightning_zero.mesh import Mesh
from lightning_zero.native.watchdog import Watchdog

__all__ = ["Alone", "Together"]

T = TypeVar("T")


class Together:
    """The ranks of a mesh, step by step.

    Args:
        mesh: whose control group they speak in.
        watchdog: is told what this rank does, and what it waits for.
    """

    def __init__(self, mesh: Mesh, watchdog: Watchdog) -> None:
        self._mesh, self._watchdog = mesh, watchdog

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
        with self._watchdog.waiting(f"the others' attempts to {what}"):
            ends = self._mesh.gathered((mine, told))
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


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _said(what: str, failed: dict[int, str], mesh: Mesh) -> str:
    texts = set(failed.values())
    if len(texts) == 1 and len(failed) > 1:
        ranks = "all ranks" if len(failed) == mesh.world_size else f"ranks {', '.join(map(str, failed))}"
        return f"Could not {what} ({ranks}): {texts.pop()}"
    return f"Could not {what}: " + "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
