"""Save by code that reports no progress.

A CheckpointIO of the user, with or without Lightning's thread around it, or a store that uploads when a file is
closed. No rank warns or ends while bytes leave the process; otherwise a message says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from fsspec.implementations.local import LocalFileOpener
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_zero import ZeroStrategy
from tests.helpers.callbacks import SavesAfter
from tests.helpers.elsewhere import mount
from tests.helpers.fabric import closing, make_fabric, network, set_up, train
from tests.helpers.logs import said_by
from tests.helpers.options import arguments
from tests.helpers.trainer import Regression, close, make_loader, make_trainer
from tests.helpers.writers import forked_writers
from tests.ranks.pool import Ranks

REPORT_S, TIMEOUT_S = 3.0, 6.0
LONG_S = TIMEOUT_S + 1.5

OPTIONS: dict[str, Any] = {
    "compile": False,
    "report_stall_after_s": REPORT_S,
    "timeout": timedelta(seconds=TIMEOUT_S),
}

Found = tuple[str, float]  # the messages, and their time


def uploads(spool: str) -> None:
    with open(spool, "wb") as file:
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            file.write(bytes(200_000))
            file.flush()
            time.sleep(0.1)


def stands(spool: str) -> None:
    time.sleep(LONG_S)


class Mine(TorchCheckpointIO):
    """CheckpointIO of a user."""

    def __init__(self, work: Callable[[str], None]) -> None:
        self._work = work

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path)
        self._work(f"{path}.spool")


def _of_trainer(path: str, in_fit: bool = False, **options: Any) -> Found:
    given = {key: options.pop(key) for key in ("plugins",) if key in options}
    callbacks = [SavesAfter(1, path)] if in_fit else []
    strategy = ZeroStrategy(**arguments(**OPTIONS | options))
    trainer = make_trainer("eager", callbacks=callbacks, strategy=strategy, **given)
    module = Regression()
    if in_fit:
        found = said_by(lambda: trainer.fit(module, make_loader("eager", steps=2)))
    else:
        trainer.fit(module, make_loader("eager", steps=2))
        dist.barrier()
        found = said_by(lambda: trainer.save_checkpoint(path))
    close(module)
    return found


def _alone(home: str) -> Found:
    return _of_trainer(f"{home}/x", plugins=[Mine(uploads)])


def _in_a_thread(home: str) -> Found:
    return _of_trainer(f"{home}/x", plugins=[AsyncCheckpointIO(Mine(uploads))])


def _at_the_end(home: str) -> Found:
    return _of_trainer(f"{home}/x", in_fit=True, plugins=[AsyncCheckpointIO(Mine(uploads))])


def _standing(home: str) -> Found:
    return _of_trainer(f"{home}/x", plugins=[AsyncCheckpointIO(Mine(stands))], timeout=timedelta(seconds=60))


def _of_fabric(home: str) -> Found:
    fabric = make_fabric("eager", checkpoint_io=Mine(uploads), **OPTIONS)
    model, optimizer = set_up(fabric, network())
    with closing(model):
        train(fabric, model, optimizer, 2)
        content = {"model": model, "optimizer": optimizer}
        return said_by(lambda: fabric.save(f"{home}/x", content))


@contextmanager
def _slow_to_close(home: str, rank: int) -> Iterator[None]:
    """At the URL, one file of that rank's."""
    mount(home)
    original, left = LocalFileOpener.close, ["one"]

    def close_file(file: Any) -> None:
        original(file)
        if left and int(os.environ["RANK"]) == rank:
            left.clear()
            uploads(f"{home}/spool")

    with patch.object(LocalFileOpener, "close", close_file):
        yield


def _at_a_url(home: str, rank: int = 0, **options: Any) -> Found:
    with _slow_to_close(home, rank), forked_writers(partial(_slow_to_close, home, rank)):
        return _of_trainer("mounted://x/y", **options)


def _full_beside(home: str) -> Found:
    return _at_a_url(home, in_fit=True, async_save=True)


def _sharded(home: str) -> Found:
    return _at_a_url(home, state_dict_type="sharded")


def _sharded_beside(home: str) -> Found:
    return _at_a_url(home, 1, in_fit=True, state_dict_type="sharded", async_save=True)


OTHERS = [_in_a_thread, _full_beside, _sharded]


@pytest.mark.parametrize(
    "attempt",
    [
        *(_alone, _at_the_end, _of_fabric, _at_a_url),
        pytest.param(_sharded_beside, marks=pytest.mark.slow),
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in OTHERS),
    ],
)
@pytest.mark.exhaustive_variants("_at_the_end", "_of_fabric", "_at_a_url", "_sharded_beside")
def test_while_bytes_leave_the_process_nobody_is_alarmed_or_ended(
    ranks: Ranks, tmp_path: Path, attempt: Callable[[str], Found]
) -> None:
    for text, seconds in ranks.run(2, attempt, str(tmp_path)):
        assert seconds > TIMEOUT_S, "it did not take long enough to show anything"
        assert "No progress" not in text, text


@pytest.mark.exhaustive  # test_long_saves.py names the writer, too
def test_where_none_do_it_is_named_who_writes_by_what(ranks: Ranks, tmp_path: Path) -> None:
    (writer, _), (waiting, _) = ranks.run(2, _standing, str(tmp_path))
    for text in (writer, waiting):
        assert text.count("No progress") == 1, text
        assert "/x by AsyncCheckpointIO around Mine (this process has handed on 0.00 GiB meanwhile)" in text
    assert "No progress. This is rank 0: " in writer
    assert "Missing: rank 0. The others: rank 0: " in waiting
