"""Test bfloat16 weights with stochastic rounding: all runners and ranks agree bitwise, and small updates add up."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.bf16_state import ROUNDING_COUNT
from lightning_zero.optim.state_dtypes import Rounding, check_rounding
from lightning_zero.step.runners import CapturedRunner
from tests.helpers.lion import Lion
from tests.helpers.rounded_steps import MAKES, Training

BF16, FP32 = torch.bfloat16, torch.float32
BEGINS = {name: make for name, make in MAKES.items() if name != "a user's own"} | {
    "SGD, no state": lambda p: torch.optim.SGD(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.02),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02, eps=(1e-7, 1e-3)),
}
RULES = [("AdamW", None), ("AdamW", "8bit"), ("Adam, amsgrad", "bf16"), ("SGD", "8bit"), ("SGD, no state", None)]
RULES += [("Adagrad", "8bit"), ("NAdam", "bf16"), ("Rprop", None)]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def run(name: str, state_dtype: str | None = None, **options: Any) -> Training:
    return Training(BEGINS[name], state_dtype, round_weights=True, **options)


@pytest.mark.parametrize(("name", "state_dtype"), RULES)
def test_captured_eager_and_on_the_host_are_the_same_to_the_last_bit(name: str, state_dtype: str | None) -> None:
    expected = run(name, state_dtype).go(4).kept()
    for on_host, capture in ((False, True), (True, False), (True, True)):
        training = run(name, state_dtype, on_host=on_host)
        training.capture(capture)
        same(training.go(4).kept(), expected)
        assert isinstance(training.stepper.runner, CapturedRunner)


@pytest.mark.parametrize(("name", "state_dtype"), RULES)
@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks_has_the_same_to_the_last_bit(name: str, state_dtype: str | None, world: int) -> None:
    expected = run(name, state_dtype).go(4).kept()
    ranks = [run(name, state_dtype, rank=rank, world=world).go(4).kept() for rank in range(world)]
    for number, entries in enumerate(expected):
        for key, value in entries.items():
            parts = [rank[number][key] for rank in ranks]
            same(torch.cat(parts) if isinstance(value, Tensor) else parts[0], value)


def test_state_is_bfloat16_or_8_bits_and_counts_are_float32() -> None:
    for state_dtype in (None, "bf16", "8bit"):
        training = run("AdamW", state_dtype).go(1)
        for number, (param, entries) in enumerate(training.optimizer.state.items()):
            assert (param.dtype, entries.pop("step").dtype) == (BF16, FP32)
            dtypes = {value.dtype for value in entries.values()}
            assert dtypes == (
                {torch.int8, torch.uint8, FP32} if state_dtype == "8bit" and number in (0, 2, 4) else {BF16}
            )


def test_every_element_is_a_neighbor_of_the_float32_result() -> None:
    """The first step begins from equal weights and state, so only its result is rounded."""
    for name in ("AdamW", "SGD, no state", "Muon", "Adafactor"):
        training = run(name)
        wide = [record.shard.float() for record in training.sharder.live]
        plain = Training(BEGINS[name], None)
        for record, values in zip(plain.sharder.live, wide, strict=True):
            numel = record.layout.numel
            record.shard[:numel] = values[:numel]
        plain_bring, bring = plain.sharder.bring, training.sharder.bring

        def bring_rounded(*args: Any, plain: Any = plain, bring: Callable[..., None] = plain_bring) -> None:
            bring(*args)
            for record in plain.sharder.live:
                record.gradient.copy_(record.gradient.to(BF16))

        plain.sharder.bring, training.sharder.bring = bring_rounded, bring
        plain.go(1)
        training.go(1)
        ups = []
        for found, expected in zip(training.sharder.live, plain.sharder.live, strict=True):
            exact = expected.shard[: expected.layout.numel]
            down = (exact.view(torch.int32) & ~0xFFFF).view(FP32)  # towards zero
            up = ((exact.view(torch.int32) | 0xFFFF) + 1).view(FP32)
            got = found.shard[: found.layout.numel].float()
            # Sums over parameters may differ in their last bits, and with them a value next to a bfloat16 one.
            between = (got == down) | (got == up) | ((got - exact).abs() < 1e-6 * exact.abs())
            assert between.all(), (name, found.name)
            if found.param.dim() == 2:
                share = ((exact - down) / (up - down))[exact != down]
                ups += [((got == up)[exact != down].double() - share.double())]
        drawn = torch.cat(ups)
        assert drawn.mean().abs() < 5 * 0.5 / len(drawn) ** 0.5, f"{name}: rounds up too often, or too seldom"


@pytest.mark.parametrize("state_dtype", [None, "8bit"])
def test_updates_below_half_the_resolution_add_up(state_dtype: str | None) -> None:
    """300 steps of 1e-5 move weights of 1 by 3e-3; their neighbors are 4e-3 and 8e-3 away."""

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0)

    moved = {}
    for rounds in (True, False):
        training = Training(make, state_dtype, round_weights=True)
        training.round_weights = rounds
        training.capture(False)
        for record in training.sharder.live:
            record.shard.fill_(1.0)
        bring = training.sharder.bring

        def bring_ones(*args: Any, training: Training = training, bring: Callable[..., None] = bring) -> None:
            bring(*args)
            for record in training.sharder.live:
                record.gradient.fill_(1.0)

        training.sharder.bring = bring_ones
        training.go(300)
        moved[rounds] = (1 - training.sharder.live[0].shard.float()).mean().item()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(3e-3, rel=0.03)


def test_a_skipped_step_changes_nothing() -> None:
    training = run("AdamW", "8bit").go(3)
    before = copy.deepcopy(training.kept())
    same(training.go(1, skip=1.0).kept(), before)
    training.steps -= 1
    same(training.go(1, skip=0.0).kept(), run("AdamW", "8bit").go(4).kept())


def test_parameters_that_begin_later_and_pause_count_their_own_steps() -> None:
    training = run("SGD, no state").go(2, without=(2, 4)).go(3)
    assert [entries[ROUNDING_COUNT] for entries in training.kept()] == [5, 5, 3, 5, 3]


def test_what_cannot_be_rounded_is_refused() -> None:
    weights = [torch.nn.Parameter(torch.zeros(4, dtype=BF16))]

    def text(make: Any, params: Any = weights) -> str:
        optimizer = make(params)
        with pytest.raises(UnsupportedError) as caught:
            check_rounding(optimizer, optimizer.param_groups, Rounding(weights=True))
        return str(caught.value)

    class Mine(torch.optim.AdamW):
        pass

    assert "Register it with lightning_zero.register_rule" in text(Mine)
    assert "give it Rule(initial=...)" in text(Lion)
    assert "pass dampening=0" in text(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5))
    wide = [torch.nn.Parameter(torch.zeros(4))]
    assert "dtypes of the trained ones are: float32. Pass precision='bf16-true'" in text(torch.optim.AdamW, wide)


def test_state_of_another_optimizer_is_refused() -> None:
    training = run("AdamW").go(1)
    for entries in training.optimizer.state.values():
        entries["step"] = 3  # a number, as in old checkpoints
    assert {entries["step"] for entries in training.go(1).kept()} == {4}
    for entries in training.optimizer.state.values():
        entries["exp_avg"] = 0.5
    with pytest.raises(UnsupportedError, match="needs the state of AdamW as its rule names it"):
        training.go(1)
