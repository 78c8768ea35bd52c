"""Test 8-bit state: all runners and numbers of ranks agree bitwise, and training stays near float32 state's."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.bf16_state import ROUNDING_COUNT
from lightning_zero.optim.quantized_state import unpack_entries
from lightning_zero.step.runners import CapturedRunner
from tests.helpers.rounded_steps import MAKES, Training

QUANTIZED = {name: make for name, make in MAKES.items() if name != "Rprop"} | {
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "Adadelta": torch.optim.Adadelta,
}
EXACT = {"RMSprop": {"square_avg", "grad_avg"}}


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def run(name: str, **options: Any) -> Training:
    return Training(QUANTIZED[name], "8bit", **options)


@pytest.mark.parametrize("name", QUANTIZED)
def test_captured_eager_and_on_the_host_are_the_same_to_the_last_bit(name: str) -> None:
    expected = run(name).go(4).kept()
    for number, entries in enumerate(expected):
        kinds = {key: value.dtype for key, value in entries.items() if isinstance(value, Tensor)}
        del kinds["param"]
        wide = {key for key, dtype in kinds.items() if dtype is torch.float32 and not key.endswith("_8bit_scales")}
        assert wide == (set(kinds) if number in (1, 3) else EXACT.get(name, set()))
    for on_host, capture in ((False, True), (True, False), (True, True)):
        training = run(name, on_host=on_host)
        training.capture(capture)
        same(training.go(4).kept(), expected)
        assert isinstance(training.stepper.runner, CapturedRunner)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks_has_the_same_to_the_last_bit(name: str, world: int) -> None:
    expected = run(name).go(4).kept()
    ranks = [run(name, rank=rank, world=world).go(4).kept() for rank in range(world)]
    for number, entries in enumerate(expected):
        for key, value in entries.items():
            parts = [rank[number][key] for rank in ranks]
            same(torch.cat(parts) if isinstance(value, Tensor) else parts[0], value)


def test_state_that_became_float_is_quantized_before_the_next_step() -> None:
    expected, training = (run("AdamW").go(2).go(1, without=(2, 4)) for _ in range(2))
    for entries in training.optimizer.state.values():
        unpack_entries(entries)
    assert {value.dtype for value in training.kept()[0].values() if isinstance(value, Tensor)} == {torch.float32}
    same(training.go(3).kept(), expected.go(3).kept())


def test_an_optimizer_that_counts_no_steps_has_them_counted() -> None:
    assert [entries.get(ROUNDING_COUNT) for entries in run("SGD").go(5).kept()] == [5, None, 5, None, 5]


def test_a_skipped_step_changes_nothing() -> None:
    training = run("AdamW").go(3)
    before = copy.deepcopy(training.kept())
    same(training.go(1, skip=1.0).kept(), before)
    training.steps -= 1
    same(training.go(1, skip=0.0).kept(), run("AdamW").go(4).kept())


@pytest.mark.parametrize("make", [MAKES["Rprop"], torch.optim.ASGD])
def test_an_optimizer_whose_steps_need_exact_state_is_refused(make: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"Write Tuning\(state_dtype='bf16'\), or leave state_dtype out"):
        Training(make, "8bit").go(1)


def descend(state_dtype: str | None, steps: int = 200) -> float:
    """Return the loss of a regression with 72 x 61 weights after steps of AdamW."""
    training = Training(lambda p: torch.optim.AdamW(p, lr=0.01), state_dtype)
    [record, *_] = training.sharder.live
    rng = torch.Generator().manual_seed(1)
    x, true = torch.randn(200, 72, generator=rng), torch.randn(72, 61, generator=rng)
    for step in range(steps):
        rows = torch.randint(0, 200, (32,), generator=rng)
        weight = record.shard[: 72 * 61].view(72, 61)
        error = x[rows] @ (weight - true) + torch.randn(32, 61, generator=rng)
        training.sharder.bring(step, (1, 2, 3, 4))
        record.gradient[: 72 * 61] = (x[rows].T @ error / 32).flatten()
        training.stepper.begin()
        training.optimizer.step()
        training.stepper.end()
    return (x @ (record.shard[: 72 * 61].view(72, 61) - true)).square().mean().item()


def test_200_steps_reach_the_loss_of_float32_state() -> None:
    assert descend("8bit") == pytest.approx(descend(None), rel=0.02)
