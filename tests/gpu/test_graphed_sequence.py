"""Captured sequences compute the same when replayed, and a failed capture leaves no state."""

import pytest
import torch

from lightning_zero.native.capture import GraphedSequence

pytestmark = pytest.mark.gpu


def test_replays_compute_what_the_function_does_with_values_of_the_moment() -> None:
    device = torch.device("cuda")
    x, total = torch.zeros(5, device=device), torch.zeros(5, device=device)
    calls = []

    def add() -> None:
        calls.append(1)
        total.add_((x + 1).square())

    sequence = GraphedSequence(add, device, watch=[x, total])
    for value in range(5):
        x.fill_(value)
        sequence()
    assert total.tolist() == [sum((v + 1) ** 2 for v in range(5))] * 5
    assert len(calls) == 2  # once to warm up, once to capture
    assert sequence.captured
    assert sequence.replays == 4


def pools() -> set[tuple[int, int]]:
    torch.cuda.empty_cache()
    return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}


def test_what_cannot_be_captured_leaves_everything_as_it_was() -> None:
    device = torch.device("cuda")
    out, before = torch.zeros(5, device=device), pools()

    def wait() -> None:
        out.add_(torch.nn.functional.dropout(torch.ones_like(out), 0.0))
        out.sum().item()

    sequence = GraphedSequence(wait, device)
    sequence()
    with pytest.raises(RuntimeError):
        sequence()
    assert not sequence.captured
    later = torch.full((1 << 22,), 2.0, device=device)
    assert (out + later[:5]).tolist() == [3.0] * 5
    assert torch.nn.functional.dropout(out, 0.5).shape == out.shape  # its generator does not count as captured
    assert pools() <= before | {(0, 0)}
