"""What is saved for backward through hooks is looked after as torch looks after it without them."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.offload.mutation_check import VersionedTensor


def hooks() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(VersionedTensor.of, VersionedTensor.unpack)


def test_what_was_changed_before_backward_is_an_error() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with hooks():
        y = x * 2
        loss = y.sin().sum()
        y[0].mul_(3)
    with pytest.raises(RuntimeError, match="inplace operation: a tensor of 3x4 in float32 was saved .* at version 0 "):
        loss.backward()


def test_what_stays_as_it_is_gives_the_same_gradients_twice() -> None:
    def second(x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad((x.exp() * x.sin()).sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found

    x = torch.randn(5, requires_grad=True)
    with hooks():
        mine = second(x)
    assert torch.equal(mine, second(x))


def test_a_result_that_no_backward_reads_is_let_go_of() -> None:
    x = torch.randn(5, requires_grad=True)
    with hooks():
        y = x.exp()
    gone = weakref.ref(y.untyped_storage())
    del y
    assert gone() is None
