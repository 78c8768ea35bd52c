"""Bytes that are alive, of real tensors and of fake ones."""

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
        with MemoryCounter() as ledger:
            made = given + 1
            view = made[2:]
            assert ledger.alive == 40
            del made
            assert ledger.alive == 40
            del view
            assert (ledger.alive, ledger.peak) == (0, 40)
            given.t()
            assert ledger.peak == 40, "what was there before does not count"


@MODES
def test_what_backward_needs_is_alive_until_it_has_run(mode: Any) -> None:
    with mode():
        weight = torch.empty(10, 10, requires_grad=True)
        given = torch.empty(5, 10)
        with MemoryCounter([weight]) as ledger:
            loss = torch.tanh(given @ weight).sum()
            assert ledger.alive == 5 * 10 * 4 + 4  # tanh saves its result, and the product needs its own no more
            loss.backward()
            weight.grad = None
            assert ledger.alive == 4


@MODES
def test_casts_of_weights_do_not_count(mode: Any) -> None:
    with mode():
        weight = torch.empty(10, 10, requires_grad=True)
        with MemoryCounter([weight]) as ledger:
            narrow = weight.to(torch.bfloat16)
            assert ledger.peak == 0
            product = narrow @ narrow
            assert ledger.peak == product.nbytes


@MODES
def test_only_what_reads_or_writes_moves_bytes(mode: Any) -> None:
    with mode():
        weight = torch.empty(10, 10, requires_grad=True)
        given = torch.empty(5, 10)
        with MemoryCounter([weight], count=lambda *_: 0) as ledger:
            torch.empty(100)
            torch.empty_like(given)
            given.detach().view(2, 25).expand(3, 2, 25)
            assert ledger.moved == 0
            made = given + 1
            assert ledger.moved == 2 * 200
            weight.backward(torch.empty(10, 10))  # autograd takes what it is given
            assert ledger.moved == 2 * 200
            made.clone()
            assert ledger.moved == 4 * 200


def test_laps_have_peaks_of_their_own() -> None:
    with MemoryCounter() as ledger:
        made = torch.ones(10)
        ledger.spike(100)
        assert (ledger.lap().allocated, ledger.lap().allocated) == (140, 40)
        del made
        now = ledger.lap()
        assert (now.allocated, now.resident, ledger.lap().allocated, ledger.peak) == (40, 0, 0, 140)
