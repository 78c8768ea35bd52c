"""Writes of one value through a mask become torch.where; other writes stay."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from functorch.compile import nop
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from lightning_zero.compile.capture.masked_writes import replace_masked_writes


def chosen(x: Tensor) -> Tensor:
    return x[..., 0] > 0


def write_vector(x: Tensor, value: Tensor) -> Tensor:
    y = x * 1
    y[chosen(x)] = value
    return y.sin()


def write_whole_rows(x: Tensor, value: Tensor) -> Tensor:
    y = x * 1
    y[chosen(x), :] = value[None]
    return y.sin()


def write_scalar(x: Tensor, value: Tensor) -> Tensor:
    y = x * 1
    y.view(-1, 3)[(x > 0).view(-1, 3)] = value[0]  # edits y, of which it is a view
    return y.sin()


def write_in_a_checkpoint(x: Tensor, value: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(write_vector, x, value, use_reentrant=False)


def write_a_value_for_each(x: Tensor, value: Tensor) -> Tensor:
    y = x.detach() * 1
    y[torch.tensor([[True, False, True], [False, True, False]])] = torch.stack([x[0, 0], x[0, 1], x[1, 1]])
    return y


def write_columns(x: Tensor, value: Tensor) -> Tensor:
    y = x * 1
    y[:, torch.tensor([True, False, True])] = value.detach()
    return y


def train(function: Callable[..., Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 3, generator=generator, requires_grad=True)
    value = torch.randn(3, generator=generator, requires_grad=True)
    out = function(x, value)
    grads = torch.autograd.grad((out * torch.arange(18.0).view(2, 3, 3)).sum(), [x, value], allow_unused=True)
    return [out.detach(), *(torch.zeros(3) if grad is None else grad for grad in grads)]


@pytest.mark.parametrize("function", [write_vector, write_whole_rows, write_scalar, write_in_a_checkpoint])
def test_a_write_of_one_value_is_traced_with_its_derivative(function: Callable[..., Tensor]) -> None:
    counts: list[int] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        counts.append(replace_masked_writes(module))
        return aot_autograd(fw_compiler=nop, bw_compiler=nop)(module, inputs)

    torch._dynamo.reset()
    found = train(torch.compile(function, backend=backend, fullgraph=True))
    assert counts == [1]
    for mine, expected in zip(found, train(function), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("function", [write_a_value_for_each, write_columns])
def test_other_writes_stay(function: Callable[..., Tensor]) -> None:
    writes: list[int] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        assert replace_masked_writes(module) == 0
        writes.append(len(module.graph.find_nodes(op="call_function", target=operator.setitem)))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(torch.ones(2, 3, 3, requires_grad=True), torch.ones(3))
    assert sum(writes) == 1
