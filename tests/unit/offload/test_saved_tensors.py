"""Test that packed tensors are checked for changes, and that the oldest move to the host."""

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.offload import saved_tensors as saved
from lightning_zero.offload.saved_tensors import SavedTensor, SavedTensorOffload, VersionedTensor


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


CPU = torch.device("cpu")


def unpack(value: VersionedTensor | SavedTensor) -> Tensor:
    return value.unpack()


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 48), nn.GELU(), nn.LayerNorm(48), nn.Dropout(0.3), nn.Linear(48, 16), nn.Sigmoid()]
    return nn.Sequential(*layers)


def trained(saves: SavedTensorOffload | None) -> list[Tensor]:
    """Return gradients of a model with views, a tensor saved twice, and one changed after it was saved."""
    module, x = net(), torch.randn(32, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.manual_seed(2)

    def loss() -> Tensor:
        q, k = module(x).chunk(2, dim=1)
        y = (q.sin() * k.cos()).t() @ (q * k)
        return torch.softmax(y, 0).square().sum()

    if saves is None:
        loss().backward()
    else:
        with torch.autograd.graph.saved_tensors_hooks(saves.pack, unpack):
            value = loss()
        value.backward()
    return [p.grad.clone() for p in (x, *module.parameters()) if p.grad is not None]


@pytest.mark.parametrize("excess", [lambda: -1.0, lambda: 1.0, lambda: 1e9])
def test_gradients_are_the_same_to_the_last_bit(excess: Callable[[], float]) -> None:
    saves = SavedTensorOffload(CPU, excess, least_bytes=0)
    for mine, theirs in zip(trained(saves), trained(None), strict=True):
        assert torch.equal(mine, theirs)
    assert (saves.nbytes > 0) == (excess() > 0)


def big(n: int, value: float) -> Tensor:
    return torch.full((n,), value)


def test_the_oldest_leave_first_and_no_more_than_is_too_much() -> None:
    room = [-1.0, -1.0, 900.0, *[-1.0] * 5]
    saves = SavedTensorOffload(CPU, lambda: room.pop(0), least_bytes=1)
    tensors = [big(100, value) for value in (1.0, 2.0, 3.0, 4.0)]
    packed: list[Any] = [saves.pack(tensor) for tensor in tensors]
    assert saves.nbytes == 3 * 400
    here = [value.memory.flat.data_ptr() == tensor.data_ptr() for value, tensor in zip(packed, tensors, strict=True)]
    assert here == [False, False, False, True]
    for value, tensor in zip(packed, tensors, strict=True):
        assert torch.equal(unpack(value), tensor)


def test_what_is_saved_first_stays_where_nobody_is_to_watch_it() -> None:
    saves = SavedTensorOffload(CPU, lambda: 1e9, least_bytes=1, unchecked_bytes=500)
    packed = [saves.pack(big(100, value)) for value in (1.0, 2.0, 3.0)]
    assert [type(one) for one in packed] == [VersionedTensor, VersionedTensor, saved.SavedTensor]
    assert (saves.nbytes, saves.largest) == (400, 400)
    for one, value in zip(packed, (1.0, 2.0, 3.0), strict=True):
        assert torch.equal(unpack(one), big(100, value))


def test_what_is_too_much_once_backward_runs_leaves_then() -> None:
    """Backward begins with the loss's temporary memory."""
    more = [0.0]
    saves = SavedTensorOffload(CPU, lambda: more[0], least_bytes=0)
    packed = [saves.pack(big(10, value)) for value in (1.0, 2.0, 3.0)]
    assert saves.nbytes == 0
    more[0] = 50.0  # bytes
    assert torch.equal(unpack(packed[2]), big(10, 3.0))
    assert saves.nbytes == 80  # of the two oldest
    more[0] = 0.0
    assert torch.equal(unpack(packed[0]), big(10, 1.0))


def test_memory_that_left_is_let_go_of() -> None:
    saves, tensor = SavedTensorOffload(CPU, lambda: 1e9, least_bytes=1), big(100, 1.0)
    gone = weakref.ref(tensor.untyped_storage())
    packed = saves.pack(tensor)
    del tensor
    assert gone() is None
    assert torch.equal(unpack(packed), big(100, 1.0))


def test_what_shares_memory_leaves_once() -> None:
    saves, tensor = SavedTensorOffload(CPU, lambda: 1e9, least_bytes=1), torch.arange(100.0)
    packed = [saves.pack(tensor), saves.pack(tensor.view(10, 10).t()), saves.pack(tensor[50:])]
    assert saves.nbytes == 400
    for value, expected in zip(packed, (tensor, tensor.view(10, 10).t(), tensor[50:]), strict=True):
        assert torch.equal(unpack(value), expected)
        assert unpack(value).stride() == expected.stride()
    before = tensor.clone()
    tensor.add_(1)
    again = saves.pack(tensor)
    assert torch.equal(unpack(again), before + 1)
    assert torch.equal(unpack(packed[0]), before), "as it was when it was saved"


def test_what_is_small_or_lies_elsewhere_stays_as_it_is() -> None:
    saves = SavedTensorOffload(CPU, lambda: 1e9, least_bytes=1000)
    for tensor in (
        big(10, 1.0),
        big(10000, 1.0)[:300],
        torch.empty(1000, device="meta"),
        torch.eye(1000).to_sparse(),
        nn.Parameter(big(1000, 1.0)),
    ):
        packed = saves.pack(tensor)
        assert isinstance(packed, VersionedTensor)
        assert packed.unpack().data_ptr() == tensor.data_ptr() if tensor.layout is torch.strided else True
    assert saves.nbytes == 0


def test_a_host_that_is_full_takes_nothing() -> None:
    saves = SavedTensorOffload(CPU, lambda: 1e9, least_bytes=1)
    with patch.object(saved, "free_bytes", lambda: 100):
        assert torch.equal(unpack(saves.pack(big(100, 1.0))), big(100, 1.0))
    assert saves.nbytes == 0


def test_what_was_changed_while_it_was_here_is_an_error_and_does_not_leave() -> None:
    room = [-1.0, -1.0, 1e9, *[-1.0] * 3]
    saves = SavedTensorOffload(CPU, lambda: room.pop(0), least_bytes=1)
    tensor, other = big(100, 1.0), big(100, 2.0)
    packed, then = saves.pack(tensor), saves.pack(other)
    tensor.mul_(2)
    later = saves.pack(big(100, 3.0))
    assert saves.nbytes == 2 * 400
    for value, expected in ((then, 2.0), (later, 3.0)):
        assert torch.equal(unpack(value), big(100, expected))
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of 100 in float32"):
        unpack(packed)
