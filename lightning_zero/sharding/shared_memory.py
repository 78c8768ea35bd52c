"""Memory that processes of one host share. It has no name, so that it ends with the last of them, however they end;
only where processes may not open each other's descriptors it is a file for the moment until all have mapped it.

Protocol: each process makes a :class:`Claim` and tells the others its ``path`` and ``identity``; they map it with
:func:`mapped`; once all have, each releases its own.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Claim", "mapped"]

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Claim:
    """Memory before it is mapped."""

    descriptor: int
    path: str  # where other processes find it
    named: bool

    @classmethod
    def of(cls, nbytes: int, named: bool = False) -> Claim:
        """
        Raises:
            OSError: there is not so much memory.
        """
        if named:
            descriptor, path = tempfile.mkstemp(prefix="lightning_zero_", dir=SHARED_MEMORY)
        else:
            descriptor = os.memfd_create("lightning_zero")
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        claim = cls(descriptor, path, named)
        try:
            # Claimed now: memory that runs out when it is first written ends the process without a word.
            os.posix_fallocate(descriptor, 0, max(nbytes, 1))
        except OSError:
            claim.release()
            raise
        return claim

    @property
    def identity(self) -> tuple[int, int]:
        """The path may lead elsewhere in another container."""
        return _identity(self.descriptor)

    def release(self) -> None:
        """It lives on where it is mapped."""
        os.close(self.descriptor)
        if self.named:
            os.unlink(self.path)


def mapped(path: str, identity: tuple[int, int], numel: int, dtype: torch.dtype) -> Tensor:
    """
    Raises:
        OSError: this process cannot open it.
    """
    with open(path, "r+b") as file:
        if _identity(file.fileno()) != identity:
            raise OSError(f"{path} is something else for this process")
        memory = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(memory, dtype=dtype, count=numel)  # holds the mapping


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
