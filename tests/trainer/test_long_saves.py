"""Accept saves longer than any timeout while bytes move, and name a stuck writer and its file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import full_checkpoint, optimizer_state, progress_reporter
from lightning_zero.checkpoint.sharded.folder import LocalFolder
from lightning_zero.integrations.checkpoint_files import read_folder
from tests.helpers.beside import ranks_beside
from tests.helpers.callbacks import SavesAfter
from tests.helpers.fabric import closing, make_fabric, network, set_up, train
from tests.helpers.logs import said_by
from tests.helpers.options import arguments
from tests.helpers.trainer import Regression, close, make_loader, make_trainer
from tests.helpers.writers import forked_writers

REPORT_S, TIMEOUT_S = 3.0, 8.0
MOVES = "moves"  # file in the working directory of all ranks and writers: when something moved

OPTIONS: dict[str, Any] = {
    "compile": False,
    "report_stall_after_s": REPORT_S,
    "timeout": timedelta(seconds=TIMEOUT_S),
}


Said = tuple[str, float, float]  # messages, seconds, and the longest time in which nothing moved


def note_move() -> None:
    with open(MOVES, "a") as file:
        file.write(f"{time.monotonic()}\n")


class Slow:
    """A file on a disk that takes its time. ``seconds``: for which call."""

    def __init__(self, file: Any, seconds: Callable[[int], float]) -> None:
        self._file, self._seconds, self._calls = file, seconds, 0
        self.name, self.fileno, self.flush, self.close = file.name, file.fileno, file.flush, file.close

    def write(self, data: Any) -> int:
        self._calls += 1
        time.sleep(self._seconds(self._calls))
        written = int(self._file.write(data))
        note_move()
        return written


@contextmanager
def slow_disk(seconds: Callable[[int], float]) -> Iterator[None]:
    def opened(*args: Any, **kwargs: Any) -> Any:
        file = open(*args, **kwargs)  # noqa: SIM115 - its user closes it
        return Slow(file, seconds) if kwargs else file

    with patch.object(full_checkpoint, "open", opened, create=True):
        yield


def slowly(call: int) -> float:
    """So that no file is written within the timeout, be it one of few pieces."""
    return 0.05 if call > 10 else 1.0


def stalling(call: int) -> float:
    return 10.0 if call == 4 else 0.0


def _trained(**options: Any) -> tuple[Any, Any]:
    trainer = make_trainer("eager", strategy=ZeroStrategy(**arguments(**OPTIONS | options)))
    module = Regression()
    trainer.fit(module, make_loader("eager", steps=2))
    dist.barrier()
    return trainer, module


def _said(seconds: Callable[[int], float], save: Callable[[], Any]) -> Said:
    begun = time.monotonic()
    with slow_disk(seconds), patch.object(progress_reporter, "LINE_INTERVAL_S", 1.0):
        text, taken = said_by(save)
    moves = sorted(map(float, Path(MOVES).read_text().split()))
    moves = [begun, *(moved for moved in moves if begun < moved < begun + taken), begun + taken]
    return text, taken, max(after - before for before, after in pairwise(moves))


def _saved(seconds: Callable[[int], float], name: str, **options: Any) -> Said:
    trainer, module = _trained(**options)
    found = _said(seconds, lambda: trainer.save_checkpoint(f"{name}.ckpt"))
    close(module)
    return found


def full_and_async() -> dict[str, Said]:
    found = {"full": _saved(slowly, "full"), "async": _saved(slowly, "async", async_save=True)}
    assert Path("full.ckpt").stat().st_size == Path("async.ckpt").stat().st_size
    return found


def stalled() -> Said:
    return _saved(stalling, "stalled", timeout=timedelta(seconds=60))


@contextmanager
def slow_folder(seconds: Callable[[int], float]) -> Iterator[None]:
    """Slow down sharded saves on rank 1 only."""
    create = LocalFolder.create

    def opened(self: LocalFolder, name: str) -> Any:
        return Slow(create(self, name), seconds if int(os.environ["RANK"]) else lambda call: 0.0)

    with patch.object(LocalFolder, "create", opened):
        yield


def _at_first(call: int) -> float:
    return 1.0 if call <= 10 else 0.0


@forked_writers(partial(slow_folder, _at_first))
def beside() -> Said:
    """Rank 0's writer has ended long before rank 1's."""
    options = OPTIONS | {"state_dict_type": "sharded", "async_save": True}
    trainer = make_trainer("eager", callbacks=[SavesAfter(1, "beside")], strategy=ZeroStrategy(**arguments(**options)))
    module = Regression()
    with slow_folder(_at_first):
        found = _said(lambda call: 0.0, lambda: trainer.fit(module, make_loader("eager", steps=2)))
    close(module)
    assert read_folder("beside", None)["global_step"] == 1
    return found


def of_fabric() -> Said:
    fabric = make_fabric("eager", **OPTIONS)
    model, optimizer = set_up(fabric, network())
    with closing(model):
        train(fabric, model, optimizer, 2)
        return _said(slowly, lambda: fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer}))


def gathered() -> Said:
    """As from a device, whose copies take rank 0 long."""
    trainer, module = _trained()
    original = optimizer_state.gather_value

    def late(*args: Any) -> Any:
        time.sleep(0.25 if dist.get_rank() == 0 else 0)
        note_move()
        return original(*args)

    with patch.object(optimizer_state, "gather_value", late):
        found = _said(lambda call: 0.0, lambda: trainer.save_checkpoint("gathered.ckpt"))
    close(module)
    return found


Found = Callable[[Callable[[], Any]], list[Any]]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, native_library: None) -> Iterator[Found]:
    """Return the messages on each rank and the duration by function; they sleep for most of the time."""
    calls: list[Callable[..., Any]] = [full_and_async] if request.config.getoption("--exhaustive") else []
    with ranks_beside([*calls, beside, of_fabric, stalled, gathered], deadline=120) as outcome:
        yield outcome


def _check(outcomes: list[Said]) -> None:
    pause = max(outcome[2] for outcome in outcomes)
    for text, seconds, _ in outcomes:
        assert seconds > TIMEOUT_S, "it did not take long enough to show anything"
        assert "No progress" not in text or pause > REPORT_S - 1, text


def test_a_writer_beside_training_is_waited_for_while_it_goes_on(found: Found) -> None:
    _check(found(beside))


WRITES = {"full": "Saving", "async": "Saving", "fabric": "Saving"}
CASES: dict[str, Callable[[], Any]] = {"fabric": of_fabric}


@pytest.mark.parametrize("case", WRITES)
@pytest.mark.exhaustive_variants("full", "async")
def test_while_bytes_move_nobody_is_alarmed_or_ended(found: Found, case: str) -> None:
    both = [each[case] for each in found(full_and_async)] if case in ("full", "async") else found(CASES[case])
    _check(both)
    for rank, (text, *_) in enumerate(both):
        lines = [line for line in text.splitlines() if "this rank has written" in line]
        assert (len(lines) > 2) == (rank == 0), text
        assert all(line.startswith(WRITES[case]) for line in lines)


def test_who_gathers_says_so(found: Found) -> None:
    (first, _, pause), (second, *_) = found(gathered)
    assert re.search(r"Gathering the state of AdamW: \d+ s \(this rank has gathered", first)
    assert "this rank has" not in second
    assert "No progress" not in first + second or pause > REPORT_S - 1


def test_where_nothing_moves_the_writer_is_named_with_what_it_writes(found: Found) -> None:
    (writer, *_), (waiting, *_) = found(stalled)
    for text in (writer, waiting):
        assert text.count("No progress") == 1, text
        assert re.search(r"stalled\.ckpt \(\d+ bytes of [\d.]+ (bytes|KiB) written\)", text), text
    assert "No progress. This is rank 0: " in writer
    assert "Missing: rank 0. The others: rank 0: " in waiting
    assert "tries to save the checkpoint " in waiting.partition("The others")[2]
