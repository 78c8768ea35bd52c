"""A folder that stays the one that was opened, when somebody puts another one in its place: its name would lead to
files of another checkpoint then, which nobody has compared with anything, or to those of another save."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from lightning_zero.checkpoint.claim import claim, release

__all__ = ["PinnedDirectory"]


class PinnedDirectory:
    """On a file system of this host.

    Args:
        folder: where it is now; it need not be there.

    Attributes:
        path: leads to it as long as this object lives; where the system cannot say so, and where there is no folder,
            the name that was given.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = str(folder)
        self._number: int | None = None
        try:
            self._number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return  # whoever reads from it will say why not
        weakref.finalize(self, os.close, self._number)
        known = f"/proc/self/fd/{self._number}"
        if os.path.isdir(known):
            self.path = known

    def claim(self, patience_s: float = 0.0) -> bool:
        """Lock the folder, see :func:`~lightning_zero.checkpoint.claim.claim`."""
        return self._number is None or claim(self._number, patience_s)

    def release(self) -> None:
        """Unlock it. Harmless when repeated."""
        if self._number is not None:
            release(self._number)

    def is_at(self, place: Path) -> bool:
        """Whether that name leads to it."""
        try:
            return self._number is not None and os.path.samestat(os.stat(place), os.fstat(self._number))
        except OSError:
            return False
