"""Test the progress of slow commands on a terminal and elsewhere."""

import io
import time

import pytest

from lightning_zero.cli.status_line import CLEAR, PLAIN_S, StatusLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, words: str) -> None:
    deadline = time.monotonic() + 30
    while words not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.005)


def test_a_terminal_has_one_line_which_is_removed_at_the_end() -> None:
    stream = Terminal()
    with StatusLine("plan", stream, terminal_s=0.01) as status:
        status.update("tracing")
        assert stream.getvalue() == f"{CLEAR}plan: tracing (0 s)", "at once"
        shown(stream, f"tracing (0 s){CLEAR}plan: tracing (0 s)")  # by the thread
        status.note("a note")
    assert f"{CLEAR}a note\n" in stream.getvalue()
    assert stream.getvalue().endswith(CLEAR)
    assert stream.getvalue().count("\n") == 1


def test_elsewhere_there_is_a_line_for_each_interval() -> None:
    assert PLAIN_S == 10
    stream = io.StringIO()
    with StatusLine("plan", stream) as status:
        status.update("importing")
        status.update("tracing")
    assert stream.getvalue() == "", "a quick command prints nothing"
    with StatusLine("plan", stream, plain_s=0.01) as status:
        status.update("tracing")
        shown(stream, "plan: tracing (0 s)\nplan: tracing (0 s)\n")
    assert CLEAR not in stream.getvalue()


def test_a_command_runs_without_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)  # as `lightning-zero doctor 2>&-` leaves it
    with StatusLine("plan") as status:
        status.update("tracing")
        status.note("a note")


def test_nothing_is_written_after_the_end() -> None:
    stream = Terminal()
    with StatusLine("plan", stream, terminal_s=0.001) as status:
        status.update("tracing")
        status.close()
        before = stream.getvalue()
        time.sleep(0.05)
        assert stream.getvalue() == before
    assert stream.getvalue() == before
