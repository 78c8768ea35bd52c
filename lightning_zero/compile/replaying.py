"""What decisions about memory ask of replays."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NoReplays", "Replaying"]


class Replaying(Protocol):
    """Captures what is compiled as CUDA graphs, which have memory of their own, and replays it."""

    @property
    def enabled(self) -> bool:
        """Whether what can be replayed is."""

    def disable(self, reason: str) -> bool:
        """Nothing is replayed any more with these options, unless one of them demands it. Whether that has changed
        anything."""


class NoReplays:
    """See :class:`Replaying`."""

    enabled = False

    def disable(self, reason: str) -> bool:
        """Nothing to decline."""
        return False
