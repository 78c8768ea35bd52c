"""Forwards that make a tensor of their own a leaf: those that transformers marks, and those whose gradient is taken."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_zero.compile.capture.requires_grad import ignore_grad_leaves

WEIGHT = torch.tensor([2.0, 3.0])


def graphs(function: Callable[..., Any], *args: Any, context: AbstractContextManager[None] | None = None) -> list[Any]:
    """What it returns, compiled, and how many graphs that took."""
    found = []

    def backend(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        found.append(module)
        return module.forward

    torch._dynamo.reset()
    with context or ignore_grad_leaves():
        result = torch.compile(function, backend=backend)(*args)
    return [result, len(found)]


def by_attribute(x: Tensor) -> None:
    x.requires_grad = True


def by_method(x: Tensor) -> None:
    x.requires_grad_()


def by_keyword(x: Tensor) -> None:
    x.requires_grad_(requires_grad=True)


WAYS = [by_attribute, by_method, by_keyword]


@pytest.mark.parametrize("mark", WAYS)
def test_a_leaf_whose_gradient_nobody_takes_does_not_end_the_graph(mark: Callable[[Tensor], None]) -> None:
    weight = WEIGHT.clone().requires_grad_()

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        hidden = x + 1
        mark(hidden)
        return (hidden * weight).sum()

    loss, count = graphs(forward, torch.ones(2), weight)
    assert count == 1
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_nor_does_one_that_is_made_in_a_checkpointed_region(reentrant: bool) -> None:
    layer = nn.Linear(2, 2)

    def region(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = torch.zeros(2, dtype=x.dtype)
            bias.requires_grad = True
        return layer(x) + bias, bias

    def forward(x: Tensor) -> Tensor:
        bias = None
        for _ in range(2):
            x, bias = torch.utils.checkpoint.checkpoint(region, x, bias, use_reentrant=reentrant)
        return x.sum()

    x = torch.ones(3, 2, requires_grad=True)
    loss, count = graphs(forward, x)
    assert count == 1
    assert torch.equal(loss, forward(x))


def outside(x: Tensor) -> None:
    torch._dynamo.graph_break()


def penalty(hidden: Tensor, weight: Tensor) -> Any:
    [grad] = torch.autograd.grad((hidden * weight).sum(), hidden, create_graph=True)
    return grad.square().sum()


def returned(hidden: Tensor, weight: Tensor) -> Any:
    return hidden, hidden * weight


def view_returned(hidden: Tensor, weight: Tensor) -> Any:
    return hidden.view(1, 2), hidden * weight


def read(hidden: Tensor, weight: Tensor) -> Any:
    return (hidden * weight).sum() * (2 if hidden.requires_grad else 1)


def read_of_what_follows(hidden: Tensor, weight: Tensor) -> Any:
    return (hidden * weight).sum() * (2 if (hidden * 3).requires_grad else 1)


def is_leaf_read(hidden: Tensor, weight: Tensor) -> Any:
    return (hidden * weight).sum() * (2 if (hidden * 3).is_leaf else 1)


def hooked(hidden: Tensor, weight: Tensor) -> Any:
    hidden.register_hook(lambda grad: grad * 2)
    return (hidden * weight).sum()


def retained(hidden: Tensor, weight: Tensor) -> Any:
    hidden.retain_grad()
    return (hidden * weight).sum()


def used_behind_a_break(hidden: Tensor, weight: Tensor) -> Any:
    product = (hidden * weight).sum()
    outside(product)
    return product + hidden.sum()


def assert_alike(found: Any, expected: Any) -> None:
    for mine, theirs in zip(*(one if isinstance(one, tuple) else (one,) for one in (found, expected)), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.requires_grad == theirs.requires_grad


ASKING = [
    penalty, returned, view_returned, read, read_of_what_follows, is_leaf_read, hooked, retained, used_behind_a_break
]  # fmt: skip


@pytest.mark.parametrize(
    ("asks", "mark"),
    [
        pytest.param(asks, mark, marks=[pytest.mark.exhaustive] * (number % len(WAYS) != way))
        for number, asks in enumerate(ASKING)
        for way, mark in enumerate(WAYS)
    ],
)
def test_where_somebody_may_ask_for_its_gradient_it_has_one(
    asks: Callable[..., Any], mark: Callable[[Tensor], None]
) -> None:
    def forward(x: Tensor, weight: Tensor) -> Any:
        hidden = x + 1
        mark(hidden)
        return asks(hidden, weight)

    weight = WEIGHT.clone().requires_grad_()
    expected = forward(torch.ones(2), weight)
    found, _ = graphs(forward, torch.ones(2), weight)
    assert_alike(found, expected)


@pytest.mark.parametrize("asks", [read, is_leaf_read, returned])
def test_so_it_has_where_a_checkpointed_region_asks(asks: Callable[..., Any]) -> None:
    weight = WEIGHT.clone().requires_grad_()

    def region(x: Tensor) -> Any:
        hidden = x + 1
        hidden.requires_grad = True
        return asks(hidden, weight)

    def forward(x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)

    expected = forward(torch.ones(2))
    found, _ = graphs(forward, torch.ones(2))
    assert_alike(found, expected)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_tensor_of_the_caller_is_marked(wanted: bool) -> None:
    def forward(x: Tensor) -> Tensor:
        x.requires_grad = wanted
        return x * 2

    x = torch.ones(2, requires_grad=not wanted)
    result, _ = graphs(forward, x)
    assert (x.requires_grad, result.requires_grad) == (wanted, wanted)


def test_outside_dynamo_is_as_it_was() -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        hidden = x + 1
        hidden.requires_grad = True
        return (hidden * weight).sum()

    with ignore_grad_leaves():
        pass
    weight = WEIGHT.clone().requires_grad_()
    _, count = graphs(forward, torch.ones(2), weight, context=nullcontext())
    assert count == 2
