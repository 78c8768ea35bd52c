"""Some bytes as a file, for those who know files only."""

from __future__ import annotations

from io import RawIOBase
from typing import Any

__all__ = ["Window"]


class Window(RawIOBase):
    """So many bytes; whoever derives from it says what stands there."""

    def __init__(self, length: int) -> None:
        self._length, self._at = length, 0

    def fill(self, at: int, view: memoryview) -> int:
        """Puts what stands from ``at`` on into ``view``, which ends within the length; how many bytes that were."""
        raise NotImplementedError

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        count = self.fill(self._at, view) if len(view) else 0
        self._at += count
        return count
