"""What ranks agree on, of what each has measured."""

from dataclasses import asdict, replace

import pytest

from lightning_zero.budget.curve import CHARTED, Curve, Point, told
from lightning_zero.budget.facts import MemoryConfig
from lightning_zero.compile.graph_plan import GraphPlan, PlanStore
from lightning_zero.compile.known import EngineMemoryFacts, StepStats, measured, room_once_replayed
from lightning_zero.compile.measuring import SteadyStats
from lightning_zero.profiling.headroom import DeviceMemory

CURVE = Curve(tuple(Point(budget, 60 * budget, 60 * budget + 10) for budget in CHARTED))
MINE = StepStats(5, room=100, replayed=-3, forward_s=0.2, traffic=7, saved=60, took=30, pass_s=0.5, passes=2)
OTHERS = [4, 110, -9, 0.1, -8, -50, -40, -0.4, -2]  # of the fields, as they are told: what is to be most, below 0


def test_of_each_number_the_ranks_take_the_one_that_asks_for_most_care() -> None:
    def least(*mine: float) -> list[float]:
        return [min(pair) for pair in zip(mine, [*OTHERS, *theirs], strict=True)]

    theirs = [-value for value in told(None)]
    expected = {"steps": 4, "room": 100, "replayed": -9, "forward_s": 0.1, "traffic": 8, "saved": 60, "took": 40}
    assert asdict(MINE.of_all(least)) == expected | {"pass_s": 0.5, "passes": 2, "curve": None}
    assert replace(MINE, curve=CURVE).of_all(least).curve is None, "another rank knows of none"
    theirs = [-value - 7 for value in told(CURVE)]
    most = replace(MINE, curve=CURVE).of_all(least).curve
    assert most is not None
    assert most.at(0.5) == Point(0.5, 37, 47)


def test_once_replayed_what_the_allocator_kept_beside_tensors_is_gone() -> None:
    memory = DeviceMemory(total=1000, others=100, reserved=700, allocated=500, resident=300)
    assert room_once_replayed(900, memory, outside=40) == pytest.approx(900 - 100 - 500 - 0.04 * 200 - 40)


@pytest.mark.parametrize("captured", [False, True])
def test_a_plan_knows_of_replays_where_there_will_be_some(captured: bool) -> None:
    facts = measured(EngineMemoryFacts(), 1000.0, MINE, captured, MemoryConfig())
    assert facts.peak == (1003 if captured else 900)
    assert (facts.speed.forward_s, facts.speed.pass_s, facts.speed.passes) == (0.2, 0.5, 2)


def test_graphs_say_what_a_pass_would_take_where_all_of_what_was_saved_is_theirs() -> None:
    plans = PlanStore()
    plans.add(GraphPlan("forward", 9, (), (), compute_s=0.1, chart=CURVE.points))
    plans.add(GraphPlan("forward", 3, (), ()))  # evaluates
    plans.add(GraphPlan("backward", 9, (), (), compute_s=0.3))
    for now in (MemoryConfig(), MemoryConfig(0.5)):
        own = StepStats.own(SteadyStats(steps=3, saved=int(60 * now.activation_memory_budget)), plans, 0.5, float)
        assert (own.curve, own.forward_s) == (CURVE, 0.1)
        assert measured(EngineMemoryFacts(), 1000.0, own, False, now).curve == CURVE
        for other in (
            0,
            2 * own.saved,
            own.saved / 2,
        ):  # nobody saw it; one of them runs twice; eager code saves as much
            assert measured(EngineMemoryFacts(), 1000.0, replace(own, saved=other), False, now).curve is None
    assert StepStats.own(SteadyStats(), PlanStore(), 0.5, float).curve is None


def test_one_rank_tells_what_its_device_had_left() -> None:
    memory = DeviceMemory(total=1000, others=100, reserved=700, allocated=500, resident=300)
    own = StepStats.own(SteadyStats(steps=3, memory=memory, outside=40), PlanStore(), 0.5, lambda total: 0.9 * total)
    assert (own.room, own.took) == (100, 200)
    assert own.replayed == room_once_replayed(900, memory, 40)
