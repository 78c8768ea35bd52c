"""How long ranks wait for each other's writers: as long as bytes move on one of them."""

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from lightning_zero.checkpoint.async_save import saver
from lightning_zero.checkpoint.async_save.saver import SaveOutcome
from lightning_zero.checkpoint.integrity import FileChecksum
from lightning_zero.checkpoint.sharded.commit import RankSummary
from tests.helpers.simulated_clock import SimulatedClock

TIMEOUT_S = 0.4
BRIEF = RankSummary({"__0_0.distcp": FileChecksum(3, "ab")}, b"plan")

Write = Callable[[SaveOutcome, SimulatedClock], None]


def _ends(
    *writes: Write, finish: Callable[[SimulatedClock], object] = lambda clock: None, longer_s: float = 0.3
) -> tuple[list[str | None], list[float], list[int]]:
    """Return for ranks that write so the error, its seconds, and the number of ranks' files in a checkpoint."""
    store, clock, made = dist.HashStore(), SimulatedClock(), []
    save: Any = SimpleNamespace(
        save_id="x", what="save a checkpoint to x", folder=SimpleNamespace(discard=lambda: None)
    )

    def one(rank: int) -> tuple[str | None, float]:
        mesh: Any = SimpleNamespace(rank=rank, world_size=len(writes), timeout_s=TIMEOUT_S)
        ours = SaveOutcome(mesh, store, save)

        def write() -> RankSummary:
            writes[rank](ours, clock)
            return BRIEF

        def make(briefs: Sequence[RankSummary]) -> None:
            assert list(briefs) == [BRIEF] * len(writes)
            finish(clock)
            made.append(len(briefs))

        begun = clock.monotonic()
        return ours.run(write, make), clock.monotonic() - begun

    with patch.multiple(saver, time=clock, PROGRESS_INTERVAL_S=0.05, POLL_S=0.01, PART_TIMEOUT_S=longer_s):
        found = clock.run([partial(one, rank) for rank in range(len(writes))])
    return [said for said, _ in found], [seconds for _, seconds in found], made


def _at_once(ours: SaveOutcome, clock: SimulatedClock) -> None:
    pass


def _going_on(ours: SaveOutcome, clock: SimulatedClock) -> None:
    for _ in range(10):
        clock.sleep(TIMEOUT_S / 4)
        ours.add_progress(2**28)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_writer_may_take_longer_than_the_timeout_while_it_goes_on(slow: int) -> None:
    said, seconds, made = _ends(*(_going_on if rank == slow else _at_once for rank in range(2)))
    assert said == [None, None]
    assert made == [2]
    assert min(seconds) > 2 * TIMEOUT_S


def test_where_nothing_moves_any_more_it_is_said_whose_writer_stands_and_where() -> None:
    def stands(ours: SaveOutcome, clock: SimulatedClock) -> None:
        ours.add_progress(3 * 2**29)
        clock.sleep(6 * TIMEOUT_S)

    said, seconds, made = _ends(_at_once, stands, _at_once, stands)
    stood = "it has not ended, and no rank wrote anything more within the timeout of 0 s; its writer was at 1.50 GiB"
    assert said == [f"Could not save a checkpoint to x: rank 1: {stood}; rank 3: {stood}"] * 4
    assert made == []
    assert max(seconds[0], seconds[2]) < 3 * TIMEOUT_S, "one rank after the other was waited for"


def test_the_others_do_not_wait_for_ever_for_rank_0() -> None:
    said, _, _ = _ends(lambda ours, clock: clock.sleep(4 * TIMEOUT_S), _at_once)
    assert said[1] == (
        "Could not save a checkpoint to x: rank 0: it has not ended, and no rank wrote anything more within the "
        "timeout of 0 s; its writer was at 0 bytes"
    )


def test_that_rank_0_makes_no_checkpoint_of_the_files_is_said() -> None:
    said, _, _ = _ends(_at_once, _at_once, finish=lambda clock: clock.sleep(4 * TIMEOUT_S))
    assert said[1] == "Could not save a checkpoint to x: rank 0 has all files, and makes no checkpoint of them"


def test_making_a_checkpoint_of_it_has_a_timeout_of_its_own() -> None:
    """The time of the last writer after its last block does not count."""
    late: Write = lambda ours, clock: clock.sleep(0.7 * TIMEOUT_S)  # noqa: E731
    said, _, made = _ends(late, _at_once, finish=lambda clock: clock.sleep(0.7 * TIMEOUT_S), longer_s=0.0)
    assert said == [None, None]
    assert made == [2]


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return ran.append, (True,)


ran: list[bool] = []


@pytest.mark.parametrize(
    "told", [pickle.dumps(_Runs()), b"\xff", b"[]", b'["summary", "{}"]', b'["summary", null]', b"[" * 100_000]
)
def test_what_others_put_into_the_store_runs_nothing(told: bytes) -> None:
    store: Any = dist.HashStore()
    mesh: Any = SimpleNamespace(rank=0, world_size=2, timeout_s=TIMEOUT_S)
    save: Any = SimpleNamespace(save_id="x", what="save a checkpoint", folder=SimpleNamespace(discard=lambda: None))
    store.set("x/1", told)
    with patch.multiple(saver, PART_TIMEOUT_S=0.1):
        said = SaveOutcome(mesh, store, save).run(lambda: BRIEF, lambda briefs: None)
    assert said is not None
    assert said.startswith("Could not save a checkpoint: rank 1: what it has told cannot be read (")
    assert not ran
