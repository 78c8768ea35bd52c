"""Test that ranks that set up exchange messages over the rendezvous store.

Ends of processes: tests/faults.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed import TCPStore

from lightning_zero.native import startup
from lightning_zero.native.startup import StartupWatch

Said = list[str]


@contextmanager
def watching(rank: int, port: int, report_s: float = 60.0) -> Iterator[tuple[Any, Said, Said]]:
    """Yield it, its output, and the text with which it would end the process."""
    said: Said = []
    ended: Said = []

    class Watch(StartupWatch):
        ticks = 0

        def _report(self, store: Any) -> None:
            super()._report(store)
            self.ticks += 1

        def _say(self, text: str) -> None:
            said.append(text)

        def _end(self, text: str) -> None:
            ended.append(text)

    with patch.object(startup, "TO_FAIL_S", 0.2), patch.object(startup, "TICK_S", 0.05):
        watch = Watch("127.0.0.1", port, rank, 2, range(2), report_s)
        try:
            yield watch, said, ended
        finally:
            watch.close()


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def until(texts: Said, seconds: float = 40.0) -> str:
    end = time.monotonic() + seconds
    while not texts and time.monotonic() < end:
        time.sleep(0.02)
    return texts[0] if texts else ""


class Clock:
    """Replaces the module ``time``; only tests advance it."""

    now = 0.0
    sleep = staticmethod(time.sleep)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(startup, "time", clock)
    return clock


def looks(watch: Any) -> None:
    """Wait until it has looked twice more, the second time entirely after this call."""
    ticks, end = watch.ticks, time.monotonic() + 40
    while watch.ticks < ticks + 2:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_who_is_not_there_is_named_once_and_joining_ends_that(store: TCPStore, clock: Clock) -> None:
    with watching(0, store.port) as (watch, said, ended):
        for now, times in ((59, 0), (61, 1), (599, 1), (601, 2)):
            clock.now = now
            looks(watch)
            assert len(said) == times
        assert "Not there yet: rank 1." in said[0]
        assert f"127.0.0.1:{store.port}" in said[0]
    clock.now = 0
    with watching(0, store.port) as (watch, said, ended):
        watch.joined()
        clock.now = 61
        looks(watch)
        assert not said
        assert not ended


def test_a_store_that_nobody_serves_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with watching(0, taken.getsockname()[1], report_s=0.2) as (_, said, _):
            assert "The store there does not answer" in until(said)


def test_a_failure_of_another_rank_ends_this_one_by_name(store: TCPStore) -> None:
    with watching(0, store.port) as (_, _, ended), watching(1, store.port) as (other, _, _):
        other.fail(ValueError("no such file\nas this"))
        assert until(ended) == "Rank 1 failed: ValueError: no such file"


def test_a_failure_is_reported_once_the_store_is_served() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served: list[TCPStore] = []
    serve = Timer(2.5, lambda: served.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)))
    with patch.object(startup, "TO_COME_S", 0.1), watching(1, port) as (failing, _, _):
        serve.start()
        failing.fail(ValueError("planned"))
        with watching(0, port) as (_, _, ended):
            assert "Rank 1 failed: ValueError: planned" in until(ended)


def test_a_process_that_is_gone_is_missed_and_one_that_has_left_is_not(store: TCPStore) -> None:
    gone = startup.own_process() | {"pid": 2**22 + 1}
    with patch.object(startup, "own_process", lambda: gone), watching(1, store.port):
        pass  # it leaves
    with watching(0, store.port) as (_, _, ended):
        assert not until(ended, 0.5)
    store.delete_key("lightning_zero/startup/0/left/1")
    with watching(0, store.port) as (_, _, ended):
        assert "The process of rank 1" in until(ended)


def test_what_was_said_in_an_earlier_start_is_not_heard(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    gone = startup.own_process() | {"pid": 2**22 + 1}
    gone["started"] = str(int(gone["started"]) - 1000)
    with (
        patch.object(startup, "own_process", lambda: gone),
        watching(1, store.port) as (watch, _, _),
    ):
        watch.fail(ValueError("long ago"))
    with watching(0, store.port, report_s=0.4) as (_, said, ended):
        assert "Not there yet: rank 1." in until(said)
        assert not ended


@pytest.mark.parametrize("fails", [True, False])
def test_a_rank_that_a_busy_machine_starts_late_hears_of_earlier_ones(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    late = startup.own_process()
    late["started"] = str(int(late["started"]) + 1000)
    over = False
    with watching(1, store.port) as (other, _, _), patch.object(startup, "own_process", lambda: late):
        # Its process ends with its last message.
        has_ended = lambda _: over or store.check(["lightning_zero/startup/0/failed/1"])  # noqa: E731
        with patch.object(startup, "has_ended", has_ended), watching(0, store.port) as (watch, _, ended):
            looks(watch)
            if fails:
                other.fail(ValueError("planned"))
            over = True
            assert until(ended).startswith("Rank 1 failed: ValueError: planned" if fails else "The process of rank 1 ")


def test_ranks_that_come_say_nothing(store: TCPStore, clock: Clock) -> None:
    with watching(0, store.port) as (first, said, ended), watching(1, store.port) as (second, others, ends):
        looks(first)  # it has announced itself, as the other has
        clock.now = 61
        looks(first)
        looks(second)
        assert not said + others + ended + ends
