"""Ranks that agree continue, ranks that do not get an error, and no wait is endless."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest

from lightning_zero.compile import consensus
from lightning_zero.compile.consensus import RankConsensus
from lightning_zero.errors import RankMismatchError
from tests.helpers.simulated_clock import SimulatedClock


class Store:
    """A key-value store like torch's, shared by threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


Rank = Callable[[RankConsensus], object]


def together(
    clock: SimulatedClock, *ranks: Rank, patience_s: float = 3.0, limit_s: float = 20.0, store: Store | None = None
) -> list[object]:
    """Return the result or the error of each rank's function, each in a thread of its own."""
    shared = store or Store()

    def run(rank: int) -> object:
        try:
            return ranks[rank](RankConsensus(shared, rank, len(ranks), patience_s, limit_s))
        except RankMismatchError as error:
            return str(error)

    with patch.object(consensus, "time", clock):
        return clock.run([partial(run, rank) for rank in range(len(ranks))])


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


def test_ranks_with_the_same_plans_go_on(clock: SimulatedClock) -> None:
    def rank(delay: float) -> Rank:
        def run(agreement: RankConsensus) -> str:
            clock.sleep(delay)
            for digest in ("forward", "backward", "forward", "other"):
                agreement.check(digest, [f"gather {digest}"])
            return "done"

        return run

    assert together(clock, rank(0), rank(0.1), rank(0.2)) == ["done"] * 3


def test_a_plan_that_was_agreed_on_needs_nobody(clock: SimulatedClock) -> None:
    def other(agreement: RankConsensus) -> None:
        agreement.check("a", ["gather a"])

    def alone(agreement: RankConsensus) -> str:
        agreement.check("a", ["gather a"])
        clock.sleep(0.2)  # the other has left
        agreement.check("a", ["gather a"])
        return "done"

    assert together(clock, alone, other) == ["done", None]


def test_ranks_with_different_plans_are_told_the_first_difference_at_once(clock: SimulatedClock) -> None:
    common = ["forward: gather x as float32, 8 bytes"]

    def rank(own: str) -> Rank:
        return lambda agreement: agreement.check(own, [*common, f"forward: gather {own} as float32, 8 bytes"])

    out = together(clock, rank("left"), rank("left"), rank("right"), patience_s=20.0)
    assert clock.monotonic() < 0.1
    for message in map(str, out):
        assert "collective 1" in message
        assert "'forward: gather left as float32, 8 bytes'" in message
        assert "'forward: gather right as float32, 8 bytes'" in message
    assert "Ranks 2 and 0" in str(out[2])


def test_a_rank_that_compiles_alone_is_told_who_did_not_come(clock: SimulatedClock) -> None:
    def follows(agreement: RankConsensus) -> None:
        agreement.check("a", ["gather a"])

    def goes_on(agreement: RankConsensus) -> None:
        agreement.check("a", ["gather a"])
        agreement.check("b", ["gather b", "gather c"])

    out = together(clock, follows, goes_on, follows)
    assert out[0] is out[2] is None
    assert "Rank 1 is about to run a newly compiled graph" in str(out[1])
    assert "rank 0, 2 did not reach" in str(out[1])
    assert "'gather b'" in str(out[1])


def test_a_rank_that_is_still_compiling_is_waited_for(clock: SimulatedClock) -> None:
    def slow(agreement: RankConsensus) -> str:
        agreement.compiling(True)
        clock.sleep(2.5)  # more than the others' patience
        agreement.compiling(False)
        agreement.check("a", ["gather a"])
        return "done"

    def quick(agreement: RankConsensus) -> str:
        clock.sleep(0.1)
        agreement.check("a", ["gather a"])
        return "done"

    assert together(clock, slow, quick, patience_s=1.5) == ["done", "done"]


def test_even_a_rank_that_compiles_is_not_waited_for_without_end(clock: SimulatedClock) -> None:
    def stuck(agreement: RankConsensus) -> None:
        agreement.compiling(True)

    out = together(clock, stuck, lambda agreement: agreement.check("a", ["gather a"]), limit_s=0.5)
    assert "rank 0 did not reach" in str(out[1])


@pytest.mark.parametrize("after", ["plan/a/1", "wants/1", "busy/1"])
def test_time_in_which_all_ranks_are_stopped_does_not_count(clock: SimulatedClock, after: str) -> None:
    class Suspended(Store):
        """The job is stopped right after rank 0 has looked for this key."""

        def check(self, keys: list[str]) -> bool:
            found = super().check(keys)
            if keys == [after] and clock.monotonic() < 60:
                clock.stop(60)
            return found

    def rank(agreement: RankConsensus) -> str:
        clock.sleep(1 if agreement._rank else 0)
        agreement.check("a", ["gather a"])
        return "done"

    assert together(clock, rank, rank, store=Suspended()) == ["done", "done"]
    assert clock.monotonic() > 60


def test_one_rank_agrees_with_itself() -> None:
    class NoStore:
        def __getattr__(self, name: str) -> object:
            raise AssertionError("nobody to talk to")

    agreement = RankConsensus(NoStore(), 0, 1, 0.1, 1.0)
    agreement.compiling(True)
    agreement.check("a", ["gather a"])


class Meanwhile(Store):
    """Right after rank 0 has looked for rank 1's plan in vain, rank 1 arrives with it, and with its next one."""

    def check(self, keys: list[str]) -> bool:
        found = super().check(keys)
        if keys == ["plan/first/1"] and not found:
            for digest in ("first", "second"):
                self.set(f"plan/{digest}/1", digest)
                self.set("wants/1", digest)
        return found


def test_a_rank_that_has_gone_on_to_its_next_plan_is_no_mismatch() -> None:
    """The slower rank may find the faster one waiting with the next plan already."""
    store = Meanwhile()
    agreement = RankConsensus(store, 0, 2, patience_s=1.0, limit_s=2.0)
    agreement.check("first", ["first"])
    assert store.get("wants/1") == b"second"
    agreement.check("second", ["second"])
    # A rank that waits with an agreed plan is late, which is no mismatch either.
    with pytest.raises(RankMismatchError, match="rank 1 did not reach"):
        agreement.check("third", ["third"])
