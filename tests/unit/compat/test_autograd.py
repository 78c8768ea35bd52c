"""What ``compat/autograd.py`` takes from torch still means the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.compat.autograd import (
    functorch_unwrapped,
    graph_task_id,
    inside_functorch,
    is_functorch_wrapped,
    retains_graph,
    preserve_versions,
    top_saved_tensors_hooks,
)


def in_backward(look: Any, **kwargs: Any) -> list[Any]:
    """What ``look()`` says in a hook of a backward."""
    said = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: said.append(look()))
    y.sum().backward(**kwargs)
    return said


def test_graph_task_id_is_minus_one_outside_of_a_backward() -> None:
    assert graph_task_id() == -1
    [inside] = in_backward(graph_task_id)
    assert inside != -1
    assert graph_task_id() == -1


@pytest.mark.parametrize("keeps", [False, True])
def test_keeps_graph_tells_what_the_backward_was_asked(keeps: bool) -> None:
    assert in_backward(retains_graph, retain_graph=keeps) == [keeps]


def test_top_saved_tensors_hooks_are_the_innermost_pair() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    def unpack(x: Tensor) -> Tensor:
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks
    assert top_saved_tensors_hooks(True) is None
    with hooks(pack, unpack):
        assert top_saved_tensors_hooks(True)[0] is pack
        with hooks(unpack, pack):
            assert top_saved_tensors_hooks(True)[0] is unpack
    assert top_saved_tensors_hooks(True) is None


def test_functorch_shows_itself_and_what_it_wraps() -> None:
    given = torch.ones(2)
    seen = []

    def look(x: Tensor) -> Tensor:
        inner = x
        while is_functorch_wrapped(inner):
            inner = functorch_unwrapped(inner)
        seen.append((inside_functorch(), is_functorch_wrapped(x), inner.data_ptr()))
        return x.sum()

    assert not inside_functorch()
    assert not is_functorch_wrapped(given)
    torch.func.grad(look)(given)
    torch.func.grad(lambda x: torch.func.grad(look)(x).sum())(given)
    assert seen == [(True, True, given.data_ptr())] * 2


def test_preserved_versions_do_not_spoil_what_was_saved() -> None:
    weight, buffer = torch.ones(2, requires_grad=True), torch.ones(2)
    loss = (weight * buffer).sum()
    with preserve_versions((buffer,)):
        buffer.fill_(3)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3]
