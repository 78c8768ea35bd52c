"""The shares of ranks in reading, and the ranks that arrive after an exception."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from lightning_zero.checkpoint import rank_tasks
from lightning_zero.checkpoint.rank_tasks import RankTasks, SingleProcess
from tests.helpers.simulated_clock import SimulatedClock
from tests.helpers.threaded import on_ranks


def test_ranks_of_a_host_share_what_lies_there() -> None:
    """Each host may have a copy of its own, and damage in one is not seen on another."""

    def on(rank: int) -> list[int]:
        mesh: Any = SimpleNamespace(hosts=(0, 1, 0, 1, 1), rank=rank, world_size=5)
        watchdog: Any = None
        return RankTasks(mesh, watchdog).host_ranks

    assert [on(rank) for rank in range(5)] == [[0, 2], [1, 3, 4], [0, 2], [1, 3, 4], [1, 3, 4]]
    assert SingleProcess().host_ranks == [0]


# -- after exceptions


def _meet(words: list[str | None], late_s: float = 0.0) -> list[str]:
    """Return the reasons that ranks with these words get; None: does not arrive. The last one is late."""
    clock = SimulatedClock()

    def attempt(ranks: RankTasks) -> str:
        word = words[ranks.rank]
        if ranks.rank == len(words) - 1:
            clock.sleep(late_s)
        return "stays away" if word is None else ranks.find_disagreement(word)

    with patch.multiple(rank_tasks, time=clock, ARRIVAL_TIMEOUT_S=0.3):
        return on_ranks(len(words), attempt, clock)


def test_ranks_that_have_all_come_may_go_on() -> None:
    assert _meet(["step 2", "step 2", "step 2"], late_s=0.1) == ["", "", ""]


def test_who_does_not_come_is_named() -> None:
    said = "rank 1 did not raise one, too, and has a part of what is to be saved"
    assert _meet(["step 2", None, "step 2"]) == [said, "stays away", said]


def test_who_comes_too_late_hears_what_the_others_have_decided() -> None:
    assert len(set(_meet(["step 2", "step 2"], late_s=0.6))) == 1
    assert "rank 1 did not" in _meet(["step 2", "step 2"], late_s=0.6)[1]


def test_ranks_that_are_not_equally_far_are_told() -> None:
    assert _meet(["after step 2", "after step 3"]) == ["rank 0 is after step 2, and rank 1 after step 3"] * 2


def test_a_new_stage_knows_nothing_of_the_last_one() -> None:
    def attempt(ranks: RankTasks) -> list[str]:
        first = ranks.find_disagreement("a")
        ranks.begin_stage()
        return [first, ranks.find_disagreement("a") if ranks.rank == 0 else "stays away"]

    clock = SimulatedClock()
    with patch.object(rank_tasks, "time", clock):
        found = on_ranks(2, attempt, clock)
    assert [first for first, _ in found] == ["", ""]
    assert "rank 1 did not" in found[0][1]
