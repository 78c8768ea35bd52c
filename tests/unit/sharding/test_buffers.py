"""Test buffers without plain memory: they are read as they are, or stay different on each rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.sharding.buffers import _Buffer, _BufferBucket, _can_be_written, _checksum


def _held(value: Tensor) -> tuple[nn.Module, _Buffer]:
    module = nn.Module()
    module.register_buffer("held", value)
    return module, _Buffer("held", module, "held")


@pytest.mark.parametrize("kind", ["conjugated", "negated"])
def test_what_is_conjugated_or_negated_travels_as_it_is_read(kind: str) -> None:
    def made(value: Tensor) -> Tensor:
        return value.conj() if kind == "conjugated" else torch._neg_view(value)

    dtype = torch.complex64 if kind == "conjugated" else torch.float32
    sent, received = made(torch.randn(7, dtype=dtype)), made(torch.zeros(7, dtype=dtype))
    (_, mine), (_, theirs) = _held(sent), _held(received)
    assert _checksum(sent) == _checksum(sent.clone().resolve_conj().resolve_neg())
    here, there = _BufferBucket([mine], sent.device), _BufferBucket([theirs], sent.device)
    assert here.exchange(receive=False)
    there.memory.copy_(here.memory)
    assert there.exchange(receive=True)
    assert torch.equal(received, sent)


def test_sparse_ones_are_each_ranks_own() -> None:
    for value in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        assert not _can_be_written(value)
    assert _can_be_written(torch.eye(3))
    assert not _can_be_written(torch.ones(1).expand(3))
