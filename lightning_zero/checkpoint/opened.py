"""A checkpoint that several ranks have written, whoever they were: what can be asked of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Opened"]


class Opened(ABC):
    """Reads no tensor until it is asked for one.

    Attributes:
        path: of the folder, as given.
        save_id: another one for each save; None where that is not known.
        has_checksums: whether :meth:`check` compares contents, and not only lengths.
        world_size: number of ranks that wrote it; None where that is not known.
    """

    path: str
    save_id: str | None
    has_checksums: bool
    world_size: int | None

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of the files that it consists of, as far as it says; 0 for one that is missing."""

    @abstractmethod
    def check(self, names: Iterable[str], read: Callable[[int], None] = lambda count: None) -> None:
        """Compares files with what is known of them.

        Args:
            names: of :meth:`sizes`.
            read: is told how many bytes were compared.

        Raises:
            CheckpointError: one is missing or damaged.
        """

    @abstractmethod
    def content(self, weights_only: bool | None = None) -> dict[str, Any]:
        """The checkpoint as one dict, with :class:`~lightning_zero.checkpoint.sharded.values.SavedValue` for what was
        sharded.

        Args:
            weights_only: False: files are trusted, and unpickled whatever they hold.

        Raises:
            CheckpointError: it is damaged, holds nothing that a loop could go on from, or what is not read.
        """

    @property
    @abstractmethod
    def written_by(self) -> str | None:
        """Program and version, where that is known."""
