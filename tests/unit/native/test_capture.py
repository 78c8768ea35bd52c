"""Test that a sequence runs eagerly on a device without graphs, and that moved memory is detected on all devices."""

import pytest
import torch

from lightning_zero.native.capture import GraphedSequence

CPU = torch.device("cpu")


def test_without_graphs_the_function_runs_each_time() -> None:
    total = torch.zeros(3)
    sequence = GraphedSequence(lambda: total.add_(1), CPU, warmups=1, watch=[total])
    for _ in range(4):
        sequence()
    assert total.tolist() == [4, 4, 4]
    assert not sequence.captured
    assert sequence.replays == 0
    assert repr(sequence) == "GraphedSequence(not captured)"


def test_memory_that_moved_is_noticed() -> None:
    total = torch.zeros(3)
    sequence = GraphedSequence(lambda: None, CPU, watch=[torch.zeros(2), total])
    sequence()
    total.set_(torch.zeros(3))
    with pytest.raises(AssertionError, match=r"the tensors \[1\] of a captured graph have moved"):
        sequence()
