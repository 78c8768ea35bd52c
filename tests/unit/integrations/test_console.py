"""Test that lines are written above progress bars, on terminals and elsewhere."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from lightning_zero.integrations.console import show_info

LINE = "Compiling 'net' (Sequential) for training: 15 s (forward)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal() -> Iterator[io.StringIO]:
    """A terminal for both outputs and for Lightning's log, whose handler keeps the stream, as Lightning's does."""
    stream = Terminal()
    log = logging.getLogger("lightning.pytorch")
    before = log.handlers, log.propagate, log.level
    log.handlers, log.propagate = [logging.StreamHandler(stream)], False
    log.setLevel(logging.INFO)
    try:
        with redirect_stdout(stream), redirect_stderr(stream):
            yield stream
    finally:
        log.handlers, log.propagate = before[0], before[1]
        log.setLevel(before[2])


def rows(text: str) -> list[str]:
    """Return the rows of a terminal that shows this text."""
    found = []
    for row in text.split("\n"):
        shown = ""
        for part in row.split("\r"):
            shown = part + shown[len(part) :]
        found.append(shown.rstrip())
    return found


def test_a_line_is_written_above_tqdms_bar_which_is_drawn_again() -> None:
    with terminal() as stream, tqdm(total=10, file=sys.stdout, desc="Epoch 0", ncols=60, ascii=True) as bar:
        bar.update(3)
        bar.refresh()
        show_info(LINE)
        shown = rows(stream.getvalue())
    assert shown[0] == LINE
    assert shown[1].startswith("Epoch 0:  30%")
    assert len(shown) == 2


def test_a_log_that_writes_through_tqdm_does_not_wait_for_a_line_for_ever() -> None:
    """tqdm's own recipe replaces sys.stderr by a file that takes tqdm's lock.

    The log's handler has its own lock.
    """
    log, handler_is_locked, line_begun = logging.getLogger("lightning.pytorch"), threading.Event(), threading.Event()

    class Slow(DummyTqdmFile):
        def write(self, text: str, nolock: bool = False) -> None:
            handler_is_locked.set()
            line_begun.wait(10)
            time.sleep(0.2)  # the other thread takes its first lock
            super().write(text, nolock)

    with terminal() as stream:
        log.handlers = [logging.StreamHandler(Slow(stream))]

        def show() -> None:
            handler_is_locked.wait(10)
            line_begun.set()
            show_info(LINE)

        threads = [threading.Thread(target=run, daemon=True) for run in (lambda: log.info("another line"), show)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def test_without_care_the_bar_would_be_broken() -> None:
    with terminal() as stream, tqdm(total=10, file=sys.stdout, desc="Epoch 0", ncols=60, ascii=True):
        logging.getLogger("lightning.pytorch").info(LINE)
        assert rows(stream.getvalue())[0].startswith("Epoch 0:")


def test_a_line_goes_through_richs_console() -> None:
    printed: list[str] = []

    class Watched(Console):
        def print(self, *objects: object, **options: object) -> None:
            printed.extend(map(str, objects))
            super().print(*objects, **options)  # type: ignore[arg-type]

    with terminal() as stream:
        handler = logging.getLogger("lightning.pytorch").handlers[0]
        assert isinstance(handler, logging.StreamHandler)
        console = Watched(file=stream, force_terminal=True, width=100)
        with Progress(console=console, auto_refresh=False) as progress:
            progress.add_task("Epoch 0", total=10)
            progress.refresh()
            show_info(LINE)
            assert LINE in printed, "Rich redraws its bar after a line that its console prints"
        assert handler.stream is stream


def test_on_no_terminal_it_is_a_line_of_the_log() -> None:
    with terminal() as stream:
        show_info("100 % of it")
        assert stream.getvalue() == "100 % of it\n"


def test_only_rank_0_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with terminal() as stream:
        show_info(LINE)
        assert stream.getvalue() == ""
