"""Share memory between processes of one host.

The memory has no name, so it is freed with the last process that maps it, however that process ends. If processes may
not open each other's descriptors, it is a file until all have mapped it.

Protocol: each process makes a :class:`Claim` and sends the others its ``path`` and ``identity``. They map it with
:func:`map_shared`. After all have, each process releases its claim.

``torch.multiprocessing`` shares tensors between a process and its children; ranks of a host need not be related.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Claim:
    """Hold shared memory before it is mapped. Other processes find it at ``path``."""

    descriptor: int
    path: str
    named: bool

    @classmethod
    def of(cls, nbytes: int, named: bool = False) -> Claim:
        """Reserve ``nbytes`` of shared memory; raise OSError if there is too little."""
        if named:
            descriptor, path = tempfile.mkstemp(prefix="lightning_zero_", dir=SHARED_MEMORY)
        else:
            descriptor = os.memfd_create("lightning_zero")
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        claim = cls(descriptor, path, named)
        try:
            # Reserve pages now: running out of memory on first write ends the process by SIGBUS.
            os.posix_fallocate(descriptor, 0, max(nbytes, 1))
        except OSError:
            claim.release()
            raise
        return claim

    @property
    def identity(self) -> tuple[int, int]:
        """Return the device and inode. The path may lead elsewhere in another container."""
        return _identity(self.descriptor)

    def release(self) -> None:
        """Close the descriptor. The memory lives on where it is mapped."""
        os.close(self.descriptor)
        if self.named:
            os.unlink(self.path)


def map_shared(path: str, identity: tuple[int, int], numel: int, dtype: torch.dtype) -> Tensor:
    """Map a claim as a 1-D tensor, which keeps the mapping alive; raise OSError if it cannot be opened."""
    with open(path, "r+b") as file:
        if _identity(file.fileno()) != identity:
            raise OSError(f"{path} is something else for this process")
        memory = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(memory, dtype=dtype, count=numel)  # holds the mapping


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
