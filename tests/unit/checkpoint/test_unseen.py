"""Bytes that a process hands on are seen from outside, and what is little, or stays in buffers, is not taken for them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_zero.checkpoint import unseen
from lightning_zero.checkpoint.progress_reporter import Telling, TellingFor
from lightning_zero.checkpoint.unseen import LEAST, Unseen

MUCH = 4 << 20
NEARLY = MUCH - 4 * LEAST  # a rest, which a look finds alone, is little; the greeting of a connection counts one


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unseen, "LOOK_S", 0.02)


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            yield ours, theirs


def _until(seen: list[int], count: int) -> None:
    end = time.monotonic() + 10
    while seen[-1] < count and time.monotonic() < end:
        time.sleep(0.01)


def test_what_is_written_into_files_is_seen(tmp_path: Path) -> None:
    seen = [0]
    with Unseen(seen.append), open(tmp_path / "x", "wb", buffering=0) as file:
        for _ in range(3):
            before = seen[-1]
            file.write(bytes(MUCH))
            _until(seen, before + MUCH)
    assert 3 * MUCH <= seen[-1] < 4 * MUCH


def test_what_is_counted_in_two_ways_is_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long write() is counted page by page where it is on its way to the disk, and once it is over as written."""
    counts = iter([{"wchar": 5, "write_bytes": 5}, {"wchar": 5, "write_bytes": MUCH}, {"wchar": MUCH, "socket:[1]": 9}])
    last = {"wchar": MUCH, "write_bytes": MUCH}
    monkeypatch.setattr(unseen, "handed_on", lambda: next(counts, last))
    seen: list[int] = []
    with Unseen(seen.append):
        time.sleep(0.3)
    assert seen == [MUCH - 5, MUCH - 5]


def test_what_is_sent_is_seen_also_through_a_connection_that_is_new(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = connection

    def take(socket: socket.socket) -> None:
        while socket.recv(1 << 20):
            pass

    threading.Thread(target=take, args=(theirs,), daemon=True).start()
    seen = [0]
    with Unseen(seen.append), socket.create_server(("127.0.0.1", 0)) as server:
        ours.sendall(bytes(MUCH))
        _until(seen, NEARLY)
        assert NEARLY <= seen[-1] <= MUCH + 1
        with socket.create_connection(server.getsockname()) as another:
            given, _ = server.accept()
            threading.Thread(target=take, args=(given,), daemon=True).start()
            another.sendall(bytes(MUCH))
            _until(seen, 2 * NEARLY)
            assert 2 * NEARLY <= seen[-1] <= 2 * (MUCH + 1)
    ours.shutdown(socket.SHUT_WR)


def test_what_nobody_takes_is_not(connection: tuple[socket.socket, socket.socket]) -> None:
    """This process goes on giving to the system, which keeps it until it has no more room."""
    ours, theirs = connection
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            ours.send(bytes(MUCH))
    time.sleep(0.3)
    seen: list[int] = []
    with Unseen(seen.append):
        time.sleep(0.3)
    assert seen == []


def test_little_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs, say: or code that hangs would be taken for one that goes on."""
    monkeypatch.setattr(unseen, "LOOK_S", 0.2)
    seen: list[int] = []
    with Unseen(seen.append), open(tmp_path / "x", "wb", buffering=0) as file:
        for _ in range(5):
            file.write(bytes(LEAST // 8))
            time.sleep(0.15)
    assert seen == []


def test_where_the_system_tells_nothing_nothing_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError(args)

    monkeypatch.setattr(unseen, "open", nothing, raising=False)
    monkeypatch.setattr(unseen.os, "listdir", nothing)
    assert unseen.handed_on() == {}


def test_others_hear_of_that_and_of_what_tells_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(unseen.Unseen, "__enter__", lambda self: self)
    monkeypatch.setattr(unseen.Unseen, "__exit__", lambda self, *error: None)
    with TellingFor("saving x by Mine", said.append) as telling:
        telling._handed_on(2**29)
        with Telling("Saving x", "written", None, total=2**30, moved=telling.inside):
            telling._handed_on(2**30)
        telling._handed_on(3 * 2**29)
    mine = "saving x by Mine (this process has handed on {} GiB meanwhile)".format
    ours = "saving x (0.00 of 1.00 GiB written)"
    assert said == [mine("0.00"), mine("0.50"), ours, ours, mine("1.00"), mine("1.50"), ""]
