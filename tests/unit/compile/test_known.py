"""What ranks agree on, of what each has measured."""

from dataclasses import asdict

import pytest

from lightning_zero.budget.facts import Chosen
from lightning_zero.compile.known import Agreed, Known, measured, room_once_replayed
from lightning_zero.profiling.headroom import DeviceMemory

MINE = Agreed(5, room=100, replayed=-3, forward_s=0.2, traffic=7, saved=60, took=30, pass_s=0.5, passes=2)
OTHERS = [4, 110, -9, 0.1, -8, -50, -40, -0.4, -2]  # of the fields, as they are told: what is to be most, below 0


def test_of_each_number_the_ranks_take_the_one_that_asks_for_most_care() -> None:
    def least(*mine: float) -> list[float]:
        return [min(pair) for pair in zip(mine, OTHERS, strict=True)]

    expected = {"steps": 4, "room": 100, "replayed": -9, "forward_s": 0.1, "traffic": 8, "saved": 60, "took": 40}
    assert asdict(MINE.of_all(least)) == expected | {"pass_s": 0.5, "passes": 2}


def test_once_replayed_what_the_allocator_kept_beside_tensors_is_gone() -> None:
    memory = DeviceMemory(total=1000, others=100, reserved=700, allocated=500, resident=300)
    assert room_once_replayed(900, memory, outside=40) == pytest.approx(900 - 100 - 500 - 0.04 * 200 - 40)


@pytest.mark.parametrize("captured", [False, True])
def test_a_plan_knows_of_replays_where_there_will_be_some(captured: bool) -> None:
    facts = measured(Known(), 1000.0, MINE, captured, Chosen())
    assert facts.peak == (1003 if captured else 900)
    assert (facts.speed.forward_s, facts.speed.pass_s, facts.speed.passes) == (0.2, 0.5, 2)
