"""Plans in which gradients alias compute copies."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_zero.config.engine_config import check_changes
from lightning_zero.config.options import Tuning
from lightning_zero.errors import UnsupportedError
from lightning_zero.memory_planner.choices import with_measured_peak
from lightning_zero.memory_planner.inputs import (
    GIB,
    Constraints,
    GradientBytes,
    MemoryConfig,
    PlannerInputs,
    StepTimes,
    apply_memory_config,
    constraints_of,
    memory_config,
)
from lightning_zero.memory_planner.memory_plan import MemoryPlan, choose_plan, with_offload_advice
from tests.helpers.options import config

SPEED = StepTimes(pass_s=0.1, gather_s=1 / 300e9, host_bytes_per_s=50e9, pass_known="measured")
# 60 GiB with all saved and nothing kept; 10 of state, 6 of master weights, and 4 of gradients.
FACTS = PlannerInputs(
    "measured",
    100 * GIB,
    60 * GIB,
    activations=30 * GIB,
    weights=3 * GIB,
    states=10 * GIB,
    masters=6 * GIB,
    gradients=GradientBytes(aliasable=4 * GIB),
    times=SPEED,
)
ALL = Constraints(offload=("optimizer", "activations", "parameters"), ring=True, grad_aliasing=True)
LIMITS = [gib * GIB for gib in (1, 15, 20, 25, 30, 33, 36, 40, 45, 50, 53, 55, 56, 57, 58, 59, 60, 61, 63, 64, 100)]


def within(gib: float, free: Constraints = ALL, **more: Any) -> MemoryPlan:
    return choose_plan(replace(FACTS, limit=gib * GIB, **more), free)


def test_what_fits_keeps_its_gradients_as_they_are_though_more_weights_could_stay() -> None:
    for gib in (60, 61, 100):
        assert within(gib).chosen == MemoryConfig(weights=min(gib - 60, 3) * GIB)
        assert not any(line.what == "gradients" for line in within(gib).lines)


def test_where_it_does_not_they_come_before_all_that_takes_time() -> None:
    plan = within(58)
    assert plan.chosen == MemoryConfig(weights=2 * GIB, grad_aliasing=True)
    assert (plan.peak, plan.fits) == (58 * GIB, True)
    assert all(line.seconds == 0 for line in plan.lines if line.what != "whole weights")
    tight = within(54)
    assert tight.chosen.grad_aliasing
    assert 0 < tight.seconds < within(54, replace(ALL, grad_aliasing=False)).seconds


def test_the_table_has_a_row_of_it_and_options_say_it() -> None:
    plan = within(57)
    (line,) = (line for line in plan.lines if line.what == "gradients")
    assert (line.choice, line.nbytes, line.saved) == ("over copies of weights, in bfloat16", 0, 4 * GIB)
    assert (line.seconds, line.by_hand) == (0, False)
    assert plan.options() == {"tuning": Tuning(grad_aliasing=True)}
    chosen = apply_memory_config(config(memory=57.0, compute_dtype=torch.bfloat16, poison=True), plan.chosen)
    assert chosen.tuning == Tuning(grad_aliasing=True, poison=True)
    assert memory_config(chosen).grad_aliasing


@pytest.mark.parametrize("limit", LIMITS)
def test_masters_that_leave_have_no_copies_for_gradients_to_lie_over(limit: float) -> None:
    chosen = choose_plan(replace(FACTS, limit=limit), ALL).chosen
    assert not (chosen.grad_aliasing and "parameters" in chosen.offload)
    assert chosen.grad_aliasing == (not ("parameters" in chosen.offload or limit >= 60 * GIB))


def test_less_memory_never_means_more_use_of_it_and_nothing_that_would_fit_is_missed() -> None:
    plans = [choose_plan(replace(FACTS, limit=limit), ALL) for limit in LIMITS]
    assert [plan.peak for plan in plans] == sorted(plan.peak for plan in plans)
    for plan, limit in zip(plans, LIMITS, strict=True):
        without = choose_plan(replace(FACTS, limit=limit), replace(ALL, grad_aliasing=False))
        assert plan.fits >= without.fits
        assert plan.peak <= without.peak or plan.fits


@pytest.mark.parametrize("limit", LIMITS)
def test_a_plan_that_was_carried_out_is_the_plan_again(limit: float) -> None:
    facts = replace(FACTS, limit=limit)
    first = choose_plan(facts, ALL)
    again = choose_plan(with_measured_peak(facts, first.chosen, first.peak), ALL)
    assert again.chosen == replace(first.chosen, weights=pytest.approx(first.chosen.weights, abs=2))
    assert again.peak == pytest.approx(first.peak, abs=2)


def test_what_turns_out_to_fit_has_its_gradients_back() -> None:
    over = replace(FACTS, current=MemoryConfig(grad_aliasing=True), limit=60 * GIB)
    assert choose_plan(replace(over, peak=56 * GIB), ALL).chosen == MemoryConfig()
    assert choose_plan(replace(over, peak=57 * GIB), ALL).chosen.grad_aliasing


def test_where_masters_could_have_left_before_that_is_still_said() -> None:
    late = replace(ALL, offload=("optimizer", "activations"))
    facts = replace(FACTS, limit=choose_plan(replace(FACTS, limit=0.0), ALL).peak)
    plan = choose_plan(facts, late)
    assert (plan.fits, plan.chosen.grad_aliasing) == (False, True)
    assert {"optimizer", "parameters"} <= {*with_offload_advice(plan, facts, late, ("parameters",)).before}


def test_where_they_cannot_or_may_not_lie_there_they_never_do() -> None:
    for limit in LIMITS:
        assert not choose_plan(replace(FACTS, limit=limit), replace(ALL, grad_aliasing=False)).chosen.grad_aliasing
        assert not choose_plan(replace(FACTS, limit=limit, gradients=GradientBytes()), ALL).chosen.grad_aliasing
        by_hand = replace(FACTS, limit=limit, gradients=GradientBytes(), current=MemoryConfig(grad_aliasing=True))
        assert choose_plan(by_hand, replace(ALL, grad_aliasing=False)).chosen.grad_aliasing, "as the user has it"


BF16: dict[str, Any] = {"memory": 20.0, "compute_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "against",
    [
        {"memory": None},
        {"grad_aliasing": False},
        {"grad_aliasing": True},
        {"compile": False},
        {"stage": 1},
        {"compute_dtype": None},
        {"compute_dtype": torch.float16},
        {"offload": ("optimizer", "parameters")},
    ],
)
def test_options_that_leave_no_choice(against: dict[str, Any]) -> None:
    assert constraints_of(config(**BF16)).grad_aliasing
    assert constraints_of(config(**BF16, stage=2)).grad_aliasing
    assert constraints_of(config(**BF16, offload=("optimizer",))).grad_aliasing
    assert not constraints_of(config(**BF16 | against)).grad_aliasing


def test_a_later_training_may_say_no_where_nobody_had_said_yes() -> None:
    left, no, yes = (config(**BF16, grad_aliasing=over) for over in (None, False, True))
    check_changes(left, no)
    check_changes(no, left)
    for before, now in ((left, yes), (yes, left), (no, yes)):
        with pytest.raises(UnsupportedError, match="grad_aliasing"):
            check_changes(before, now)
