"""Replays as autograd and the caller see them."""

import pytest
import torch

from lightning_zero.compile.cuda_graphs.captured_call import unsupported_input
from lightning_zero.compile.cuda_graphs.manager import WARMUP_RUNS
from tests.unit.compile.cuda_graphs.fakes import Training, captured


def test_outputs_are_the_callers_to_keep() -> None:
    training = captured(Training())
    first, plus = training.call(training.weight, torch.ones(2))
    training.backward(first)
    second, _ = training.call(training.weight, torch.full((2,), 2.0))
    training.backward(second)
    assert (first.item(), second.item(), plus.tolist()) == (18, 72, [2, 2])
    assert not plus.requires_grad


def test_an_input_gets_its_gradient() -> None:
    training = Training()
    for number in range(6):
        batch = torch.full((2,), float(number), requires_grad=True)
        training.step(batch)
        assert batch.grad.tolist() == [18 * number] * 2
    assert training.made[0].replays


def test_a_second_backward_through_one_call_raises() -> None:
    training = captured(Training())
    loss, _ = training.call(training.weight, torch.ones(2))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice.*cuda_graphs=False"):
        loss.backward()


def test_memory_that_a_backward_needs_is_given_back_after_it() -> None:
    training = captured(Training())
    loss, _ = training.call(training.weight, torch.ones(2))
    training.replays.drop()
    assert not training.made[0].closed
    training.backward(loss)
    assert training.made[0].closed


def test_a_loss_that_nobody_holds_needs_no_backward() -> None:
    training = captured(Training())
    training.call(training.weight, torch.ones(2))
    training.replays.drop()
    assert training.made[0].closed


def test_captured_is_nothing_that_autograd_knew_before() -> None:
    training = Training()
    loss, _ = training.call(training.weight, torch.ones(2))
    training.backward(loss)  # the loss still references the weight's node
    for _ in range(WARMUP_RUNS):  # the call above was the first run
        training.step()
    weight, batch = training.made[0].job.inputs
    assert weight is not training.weight
    assert weight.data_ptr() == training.weight.data_ptr()
    assert weight.requires_grad
    assert not batch.requires_grad


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(3, 4).t(), ""),
        (torch.ones(2, 5)[:, :-1], ""),
        (torch.ones(1).expand(3), "share memory"),
        (torch.ones(5).as_strided((3, 3), (1, 1)), "share memory"),
        (torch.eye(2).to_sparse(), "share memory"),
        (torch.ones(1, device="meta"), "another device"),
    ],
)
def test_inputs_must_be_copies_of_their_own(tensor: torch.Tensor, reason: str) -> None:
    found = unsupported_input((tensor, 3), torch.device("cpu"))
    assert reason in found
    assert bool(reason) == bool(found)
