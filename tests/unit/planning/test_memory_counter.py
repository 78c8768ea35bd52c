"""Bytes of live tensors."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lightning_zero.compat.tensors import FakeTensorMode
from lightning_zero.planning.memory_counter import MemoryCounter

MODES = pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode], ids=["real", "fake"])


@MODES
def test_what_is_alive_is_counted_once_and_until_nobody_has_it(mode: Any) -> None:
    with mode():
        given = torch.empty(10)
        with MemoryCounter() as counter:
            made = given + 1
            view = made[2:]
            assert counter.alive == 40
            del made
            assert counter.alive == 40
            del view
            assert (counter.alive, counter.peak) == (0, 40)
            given.t()
            assert counter.peak == 40, "what was there before does not count"


@MODES
def test_what_backward_needs_is_alive_until_it_has_run(mode: Any) -> None:
    with mode():
        weight = torch.empty(10, 10, requires_grad=True)
        given = torch.empty(5, 10)
        with MemoryCounter([weight]) as counter:
            loss = torch.tanh(given @ weight).sum()
            assert counter.alive == 5 * 10 * 4 + 4  # tanh saves its result, and the product needs its own no more
            loss.backward()
            weight.grad = None
            assert counter.alive == 4


@MODES
def test_casts_of_weights_do_not_count(mode: Any) -> None:
    with mode():
        weight = torch.empty(10, 10, requires_grad=True)
        with MemoryCounter([weight]) as counter:
            narrow = weight.to(torch.bfloat16)
            assert counter.peak == 0
            product = narrow @ narrow
            assert counter.peak == product.nbytes


@MODES
def test_only_what_reads_or_writes_moves_bytes(mode: Any) -> None:
    with mode():
        weight = torch.empty(10, 10, requires_grad=True)
        given = torch.empty(5, 10)
        with MemoryCounter([weight], count_flops=lambda *_: 0) as counter:
            torch.empty(100)
            torch.empty_like(given)
            given.detach().view(2, 25).expand(3, 2, 25)
            assert counter.moved == 0
            made = given + 1
            assert counter.moved == 2 * 200
            weight.backward(torch.empty(10, 10))  # autograd keeps the given gradient
            assert counter.moved == 2 * 200
            made.clone()
            assert counter.moved == 4 * 200


def test_temporary_bytes_count_at_the_peak_only() -> None:
    with MemoryCounter() as counter:
        made = torch.ones(10)
        counter.add_temporary(100)
        assert (counter.alive, counter.peak) == (40, 140)
        del made
        assert (counter.alive, counter.peak) == (0, 140)
