"""Plans within a limit: choices, their order, and the advice if nothing fits."""

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest

from lightning_zero.config import EngineConfig
from lightning_zero.config.options import Tuning
from lightning_zero.config.text import format_bytes
from lightning_zero.memory_planner.choices import (
    BUDGETS,
    Variant,
    contention_seconds,
    host_bytes,
    planner_items,
    recomputed_share,
    size_of,
)
from lightning_zero.memory_planner.inputs import (
    GIB,
    Constraints,
    GradientBytes,
    MemoryConfig,
    PlannerInputs,
    StepTimes,
    apply_memory_config,
    constraints_of,
)
from lightning_zero.memory_planner.memory_plan import choose_plan, with_offload_advice

SPEED = StepTimes(pass_s=0.1, gather_s=1 / 300e9, host_bytes_per_s=50e9, pass_known="measured")
# 60 GiB with all saved and nothing kept; 10 of state.
FACTS = PlannerInputs(
    "measured", 100 * GIB, 60 * GIB, activations=30 * GIB, weights=3 * GIB, states=10 * GIB, times=SPEED
)
ALL = Constraints(offload=("optimizer", "activations", "parameters"), ring=True)
LIMITS = [gib * GIB for gib in (1, 15, 20, 25, 30, 33, 36, 40, 45, 50, 55, 58, 59, 60, 61, 62, 63, 64, 70, 100)]


def within(gib: float, free: Constraints = ALL, **more: object) -> MemoryConfig:
    plan = choose_plan(replace(FACTS, limit=gib * GIB, **more), free)  # type: ignore[arg-type]
    assert plan.fits == (plan.peak <= gib * GIB)
    return plan.chosen


def test_where_all_fits_nothing_is_lost() -> None:
    plan = choose_plan(FACTS, ALL)
    assert plan.chosen == MemoryConfig(weights=3 * GIB)
    assert plan.peak == 63 * GIB
    assert [line.seconds for line in plan.lines] == [0, 0, 0]


def test_what_is_left_goes_to_weights() -> None:
    assert within(61).weights == GIB
    assert within(60).weights == 0


def test_the_first_bytes_are_those_that_are_cheap_to_compute_again() -> None:
    # 6 GiB: three tenths of the activations, four fifths of which are off the peak, for 0.036 of a forward each; or
    # 10 GiB of state for 0.2 s.
    chosen = within(54)
    assert (chosen.activation_memory_budget, chosen.offload) == (0.7, ())


def test_state_goes_to_the_host_where_many_passes_share_a_step() -> None:
    many = replace(SPEED, passes=64.0)
    assert within(50, times=many, current=MemoryConfig()).offload == ("optimizer",)
    assert within(50).offload == ()


# Only state can move; 4.66 GiB of it are copied in each direction during a pass.
LIGHT = replace(FACTS, activations=0.0, weights=0.0)


@pytest.mark.parametrize(("limit", "ring"), [(60, None), (59, 8), (55, 4), (53.9, 2), (51.5, 1), (51, 1), (50.5, 0.5)])
def test_buffers_are_as_large_as_the_limit_allows_and_a_pass_makes_use_of(limit: float, ring: float | None) -> None:
    plan = choose_plan(replace(LIGHT, limit=limit * GIB), ALL)
    assert plan.chosen == (
        MemoryConfig() if ring is None else MemoryConfig(offload=("optimizer",), ring=int(ring * GIB))
    )
    (line,) = (line for line in plan.lines if line.what == "on the host")
    hidden = 10 if ring is None else min(ring, 5e9 / GIB)
    assert line.seconds == pytest.approx((10 - hidden) * GIB / 50e9)
    if ring is not None:
        assert plan.peak == (50 + ring) * GIB
        assert line.choice == f"optimizer state, {format_bytes(ring * GIB)} of buffers"
        assert plan.options() == {"offload": ("optimizer",), "tuning": Tuning(offload_buffer_mb=ring * 1024)}


def test_buffers_stay_as_they_are_by_hand_while_nobody_knows_a_pass_and_for_masters() -> None:
    tight = replace(LIGHT, limit=55 * GIB)
    assert choose_plan(replace(tight, limit=50.3 * GIB), ALL).chosen.ring == 0
    assert choose_plan(replace(tight, ring=0.0), ALL).chosen.ring == 4 * GIB
    assert choose_plan(tight, replace(ALL, ring=False)).chosen == MemoryConfig(offload=("optimizer",))
    assert choose_plan(replace(tight, times=replace(SPEED, pass_known="guessed from the first")), ALL).chosen.ring == 0
    masters = choose_plan(replace(tight, masters=6 * GIB, limit=45 * GIB), ALL).chosen
    assert (masters.offload, masters.ring) == (("optimizer", "parameters"), 0)
    by_hand = choose_plan(
        replace(tight, current=MemoryConfig(offload=("optimizer",)), peak=50.25 * GIB), replace(ALL, offload=None)
    )
    assert "optimizer state (by hand), 4.00 GiB of buffers  " in str(by_hand)
    chosen = choose_plan(tight, ALL).chosen
    assert apply_memory_config(EngineConfig(memory=55.0), chosen).tuning.offload_buffer_mb == 4096
    assert constraints_of(EngineConfig(memory=55.0)).ring
    assert not constraints_of(EngineConfig()).ring
    assert not constraints_of(EngineConfig(memory=55.0, tuning=Tuning(offload_buffer_mb=1000))).ring


def test_where_nothing_comes_ahead_no_memory_is_spent_on_it() -> None:
    """With several optimizers, or without a captured step, state is not prefetched."""
    facts = replace(LIGHT, limit=55 * GIB, prefetches_state=False)
    plan = choose_plan(facts, ALL)
    assert plan.chosen == MemoryConfig(offload=("optimizer",))
    (line,) = (line for line in plan.lines if line.what == "on the host")
    assert line.seconds == pytest.approx(10 * GIB / 50e9)


def test_state_that_comes_beside_a_pass_and_activations_that_leave_it_are_in_each_others_way() -> None:
    facts = replace(LIGHT, limit=55 * GIB, activations=20 * GIB)
    away = MemoryConfig(activation_memory_budget=1.0, offload=("optimizer", "activations"), ring=4 * GIB)
    assert choose_plan(replace(facts, limit=64 * GIB), ALL).chosen.offload != away.offload
    for limit in range(45, 70):
        chosen = choose_plan(replace(facts, limit=limit * GIB), ALL).chosen
        assert not ("activations" in chosen.offload and chosen.ring), "buffers that hide nothing"


def test_only_what_may_leave_does() -> None:
    assert within(25, Constraints(offload=())).offload == ()
    assert "activations" not in within(25, Constraints(offload=("optimizer",))).offload
    assert not within(20, Constraints(offload=None)).offload
    assert within(36, ALL, host_free=9 * GIB, activations=0.0, weights=0.0).offload == (), "the host has no room"


def test_activations_leave_beside_what_a_forward_computes_however_slow_its_host_was() -> None:
    away = MemoryConfig(offload=("activations",))
    assert size_of(away, FACTS) == pytest.approx(30 * GIB - 0.1 / 3 * 50e9 + 10 * GIB)
    known = replace(FACTS, times=replace(SPEED, forward_s=0.01))
    assert size_of(away, known) == pytest.approx(30 * GIB - 0.01 * 50e9 + 10 * GIB)
    slower = replace(FACTS, times=replace(SPEED, forward_s=1.0))
    assert size_of(away, slower) == size_of(away, FACTS)


@pytest.mark.parametrize(
    "now", [MemoryConfig(), MemoryConfig(0.5), MemoryConfig(0.5, ("optimizer",)), MemoryConfig(weights=2 * GIB)]
)
@pytest.mark.parametrize(
    "free", [ALL, Constraints(offload=None), Constraints(activations=False, offload=("optimizer",))]
)
def test_less_memory_never_means_more_use_of_it(now: MemoryConfig, free: Constraints) -> None:
    plans = [choose_plan(replace(FACTS, limit=limit, current=now), free) for limit in LIMITS]
    assert [plan.peak for plan in plans] == sorted(plan.peak for plan in plans)
    assert all(plan.peak <= limit for plan, limit in zip(plans, LIMITS, strict=True) if plan.fits)
    assert {plan.missing for plan in plans if plan.fits} == {0}


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_set_by_hand_stays(limit: float) -> None:
    for budget, offload, weights in product((1.0, 0.7), ((), ("optimizer",)), (0.0, GIB)):
        now = MemoryConfig(budget, offload, weights)
        facts = replace(FACTS, limit=limit, current=now)
        assert choose_plan(facts, Constraints(False, False, None)).chosen == now
        assert choose_plan(facts, Constraints(False, True, ALL.offload)).chosen.activation_memory_budget == budget
        assert choose_plan(facts, Constraints(True, False, ALL.offload)).chosen.weights == weights
        assert choose_plan(facts, Constraints(True, True, None)).chosen.offload == offload


@pytest.mark.parametrize("limit", LIMITS)
def test_a_plan_that_was_carried_out_is_the_plan_again(limit: float) -> None:
    first = choose_plan(replace(FACTS, limit=limit), ALL)
    again = choose_plan(replace(FACTS, limit=limit, peak=first.peak, current=first.chosen), ALL)
    assert again.chosen == replace(first.chosen, weights=pytest.approx(first.chosen.weights, abs=2))
    assert again.peak == pytest.approx(first.peak, abs=2)


def test_weights_stay_until_the_step_where_passes_share_one() -> None:
    assert within(100, times=replace(SPEED, passes=4.0)).until == "step"
    assert within(100).until == "backward"


# No weights are kept, so that a choice is one of the items' variants; and there are 6 GiB of master weights.
HEAVY = replace(FACTS, weights=0.0, masters=6 * GIB)


@pytest.mark.parametrize("limit", LIMITS)
def test_no_other_pick_within_the_limit_is_faster(limit: float) -> None:
    facts = replace(HEAVY, limit=limit)
    assert_the_best(facts, product(*(item.variants for item in planner_items(facts, ALL))))


def assert_the_best(facts: PlannerInputs, picks: Iterable[tuple[Variant, ...]]) -> None:
    """Assert that the choice is the fastest pick within the limit, or the smallest one."""
    base, items = facts.peak - size_of(facts.current, facts), planner_items(facts, ALL)
    sizes = [
        (
            base + sum(one.nbytes for one in picked),
            sum(one.seconds for one in picked) + contention_seconds(picked, facts),
        )
        for picked in picks
    ]
    plan = choose_plan(facts, ALL)
    fastest = sum(min(one.seconds for one in item.variants) for item in items)
    fitting = [seconds for nbytes, seconds in sizes if nbytes <= facts.limit]
    assert plan.fits == bool(fitting)
    if fitting:
        assert sum(line.seconds for line in plan.lines) == pytest.approx(min(fitting) - fastest)
    else:
        assert plan.peak == pytest.approx(min(nbytes for nbytes, _ in sizes), abs=2)


def least(free: Constraints) -> float:
    return choose_plan(replace(HEAVY, limit=0.0), free).peak


def test_master_weights_leave_where_nothing_else_would_do_and_nothing_hides_their_copies() -> None:
    without = Constraints(offload=("optimizer", "activations"))
    limit = least(without) - GIB
    plan = choose_plan(replace(HEAVY, limit=limit), ALL)
    assert plan.fits
    assert {"optimizer", "parameters"} <= set(plan.chosen.offload)
    assert least(without) - least(ALL) == pytest.approx(6 * GIB, abs=2)
    line = next(line for line in plan.lines if line.what == "on the host")
    assert line.choice == "optimizer state and master weights"
    assert line.seconds == pytest.approx(16 * GIB / 50e9)
    assert not choose_plan(replace(HEAVY, limit=limit, host_free=15 * GIB), ALL).fits, "the host has no room for both"


def test_where_masters_were_laid_out_already_the_plan_says_that_they_could_have_left() -> None:
    without = Constraints(offload=("optimizer", "activations"))
    facts = replace(HEAVY, limit=least(without) - GIB)
    plan = choose_plan(facts, without)
    assert not plan.fits
    found = with_offload_advice(plan, facts, without, ("parameters",))
    assert {"optimizer", "parameters"} <= {*found.before}
    assert f"offload={found.before!r} is estimated to fit, and has to be passed before" in found.advice()
    assert found.chosen == plan.chosen
    for free, before in ((without, ()), (Constraints(offload=None), ("parameters",))):
        assert with_offload_advice(choose_plan(facts, free), facts, free, before).before == ()
    assert with_offload_advice(plan, replace(facts, limit=GIB), without, ("parameters",)).before == (), "nothing fits"


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("host", [5, 15, 18])
def test_the_host_has_room_for_all_that_goes_there_together(limit: float, host: int) -> None:
    facts = replace(HEAVY, limit=limit, host_free=host * GIB)
    picks = product(*(item.variants for item in planner_items(facts, ALL)))
    assert_the_best(facts, (picked for picked in picks if host_bytes(picked, facts) <= facts.host_free))


def test_masters_that_have_left_stay_there_with_the_state_that_comes_with_them() -> None:
    away = replace(HEAVY, current=MemoryConfig(offload=("optimizer", "parameters")), limit=1000 * GIB)
    for free in (Constraints(offload=("optimizer", "activations")), Constraints(offload=None)):
        assert choose_plan(away, free).chosen.offload == ("optimizer", "parameters")
    assert choose_plan(away, ALL).chosen.offload == (), "on paper they come back"


def test_how_sure_seconds_are_stands_below_the_table() -> None:
    known = replace(SPEED, pass_known="measured", host_known="nominal")
    text = str(choose_plan(replace(FACTS, times=known), ALL))
    assert text.endswith(
        "seconds: of a pass measured (100 ms), of copies to and from the host nominal (50 GB/s each way)"
    )


# 8 passes in a step, of which each has 12 GiB of gradients to reduce over links of 28 GB/s: 0.46 s, during 0.07.
MANY = replace(FACTS, gradients=GradientBytes(24 * GIB, 12 * GIB), times=replace(SPEED, passes=8.0, gather_s=1 / 28e9))


def test_gradients_of_micro_batches_are_reduced_once_where_that_is_faster_and_memory_allows() -> None:
    plan = choose_plan(replace(MANY, limit=90 * GIB), ALL)
    assert plan.chosen.reduce_once
    assert plan.peak == (60 + 24 + 3) * GIB
    line = next(line for line in plan.lines if line.what == "gradients")
    assert (line.choice, line.seconds) == ("stay whole, reduced once a step", 0.0)
    assert size_of(plan.chosen, MANY) == pytest.approx(sum(line.nbytes for line in plan.lines), abs=8)
    again = choose_plan(replace(MANY, limit=90 * GIB, peak=plan.peak, current=plan.chosen), ALL)
    assert again.chosen == plan.chosen
    assert not choose_plan(replace(MANY, limit=40 * GIB, peak=plan.peak, current=plan.chosen), ALL).chosen.reduce_once


@pytest.mark.parametrize(
    "facts",
    [
        replace(MANY, times=replace(MANY.times, passes=1.0)),
        replace(MANY, times=replace(MANY.times, gather_s=1 / 300e9)),  # hidden by backward
        replace(MANY, gradients=GradientBytes(reduced=12 * GIB)),
        replace(MANY, limit=30 * GIB),
    ],
)
def test_otherwise_each_pass_reduces_its_own(facts: PlannerInputs) -> None:
    assert not choose_plan(facts, ALL).chosen.reduce_once


def test_a_stage_that_was_set_by_hand_stays() -> None:
    for memory, stage in product((None, 40.0), (1, 2, 3)):
        free = constraints_of(EngineConfig(memory=memory, stage=stage))  # type: ignore[arg-type]
        assert free.gradients == (memory is not None and stage == 3)
    assert not choose_plan(MANY, replace(ALL, gradients=False)).chosen.reduce_once


def test_seconds_grow_with_what_is_computed_again_and_moved() -> None:
    shares = [recomputed_share(budget) for budget in sorted(BUDGETS)]
    assert shares == sorted(shares, reverse=True)
    assert (recomputed_share(1.0), recomputed_share(0.0)) == (0.0, 1.0)
    for item in planner_items(FACTS, ALL):
        assert all(variant.seconds >= 0 for variant in item.variants)
        assert len({variant.value for variant in item.variants}) == len(item.variants)


def test_sizes_are_those_of_the_variants() -> None:
    plan = choose_plan(replace(FACTS, limit=40 * GIB), ALL)
    assert size_of(plan.chosen, FACTS) == pytest.approx(sum(line.nbytes for line in plan.lines), abs=8)


def test_what_is_decided_later_stays_and_is_not_spoken_of() -> None:
    plan = choose_plan(replace(FACTS, limit=40 * GIB), ALL, later=("activations", "whole weights"))
    assert (plan.chosen.activation_memory_budget, plan.chosen.weights) == (1.0, 0.0)
    assert [line.what for line in plan.lines] == ["on the host"]


def test_it_prints_and_says_what_to_do_where_nothing_fits() -> None:
    plan = choose_plan(replace(FACTS, limit=5 * GIB), Constraints(offload=("optimizer",)))
    assert plan.missing > 0
    assert f"and the limit is 5.00 GiB. The limit is exceeded by {format_bytes(plan.missing)}." in str(plan)
    assert "at their smallest" in plan.advice()
    assert plan.options() == {"activation_memory_budget": 0.2, "offload": ("optimizer",)}
    by_hand = choose_plan(replace(FACTS, limit=5 * GIB), Constraints(False, False, None))
    assert "by hand" in str(by_hand)
    assert "leave activation_memory_budget and reshard_after_forward and offload at the default" in by_hand.advice()
    found = json.loads(json.dumps(plan.as_dict()))
    assert (found["missing"], found["fits"]) == (plan.missing, False)
    assert found["chosen"]["offload"] == ["optimizer"]
