"""Test that shared memory ends with the processes that map it."""

import os
import signal
from pathlib import Path

import pytest
import torch

from lightning_zero.sharding import shared_memory
from lightning_zero.sharding.shared_memory import Claim, map_shared


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of named memory."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_a_killed_process_leaves_nothing(folder: Path) -> None:
    """It is killed before another process has mapped its memory; one that has keeps it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        claim = Claim.of(64)
        map_shared(claim.path, claim.identity, 8, torch.int64).fill_(5)
        os.write(writer, f"{claim.path} {claim.identity[0]} {claim.identity[1]}".encode())
        signal.pause()
    path, device, inode = os.read(reader, 1000).decode().split()
    tensor = map_shared(path, (int(device), int(inode)), 8, torch.int64)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert tensor.tolist() == [5] * 8
    assert not list(folder.iterdir())
    with pytest.raises(OSError, match="No such file"):
        map_shared(path, (int(device), int(inode)), 8, torch.int64)


@pytest.mark.parametrize("named", [False, True])
def test_what_is_released_lives_on_where_it_is_mapped(folder: Path, named: bool) -> None:
    claim = Claim.of(24, named)
    tensor = map_shared(claim.path, claim.identity, 3, torch.int64)
    other = map_shared(claim.path, claim.identity, 3, torch.int64)
    assert len(list(folder.iterdir())) == named
    claim.release()
    assert not list(folder.iterdir())
    tensor.fill_(3)
    assert other.tolist() == [3] * 3


def test_what_lies_there_for_others_is_not_taken() -> None:
    """Another container may have a process of the same number."""
    first, second = Claim.of(8), Claim.of(8)
    with pytest.raises(OSError, match="something else for this process"):
        map_shared(first.path, second.identity, 1, torch.int64)
    first.release()
    second.release()


@pytest.mark.parametrize("named", [False, True])
def test_a_claim_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Claim.of(64, named)
    assert not list(folder.iterdir())
    assert len(os.listdir("/proc/self/fd")) == descriptors
