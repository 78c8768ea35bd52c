"""Saves that take longer than anybody waits for: nobody is alarmed, and none is ended, as long as bytes move; where they
do not, who writes is named, with what it writes."""

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

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import archive, full, telling
from lightning_zero.checkpoint.sharded.folder import LocalFolder
from lightning_zero.checkpoint.weights import writing
from lightning_zero.integrations.folders import read_whole
from tests.helpers.callbacks import SavesAfter
from tests.helpers.fabric import closing, make_fabric, network, set_up, train
from tests.helpers.logs import said_by
from tests.helpers.options import arguments
from tests.helpers.trainer import Regression, close, make_loader, make_trainer
from tests.helpers.writers import forked_writers
from tests.ranks.pool import Ranks

REPORT_S, TIMEOUT_S = 3.0, 6.0

OPTIONS: dict[str, Any] = {
    "compile": False,
    "report_stall_after_s": REPORT_S,
    "timeout": timedelta(seconds=TIMEOUT_S),
}


class Slow:
    """A file on a disk that takes its time. ``seconds``: for which call."""

    def __init__(self, file: Any, seconds: Callable[[int], float]) -> None:
        self._file, self._seconds, self._calls = file, seconds, 0
        self.name, self.fileno, self.flush, self.close = file.name, file.fileno, file.flush, file.close

    def write(self, data: Any) -> int:
        self._calls += 1
        time.sleep(self._seconds(self._calls))
        return int(self._file.write(data))


@contextmanager
def slow_disk(seconds: Callable[[int], float]) -> Iterator[None]:
    def opened(*args: Any, **kwargs: Any) -> Any:
        file = open(*args, **kwargs)  # noqa: SIM115 - its user closes it
        return Slow(file, seconds) if kwargs else file

    with patch.object(archive, "open", opened, create=True), patch.object(writing, "open", opened, create=True):
        yield


def slowly(call: int) -> float:
    """So that no file is written within the timeout, be it one of few pieces."""
    return 0.05 if call > 8 else 1.0


def stalling(call: int) -> float:
    return 8.0 if call == 4 else 0.0


def _trained(**options: Any) -> tuple[Any, Any]:
    trainer = make_trainer("eager", strategy=ZeroStrategy(**arguments(**OPTIONS | options)))
    module = Regression()
    trainer.fit(module, make_loader("eager", steps=2))
    dist.barrier()
    return trainer, module


def _said(seconds: Callable[[int], float], save: Callable[[], Any]) -> tuple[str, float]:
    """Meanwhile, and how long that was."""
    with slow_disk(seconds), patch.object(telling, "EVERY_S", 1.0):
        return said_by(save)


def _saved(home: str) -> dict[str, tuple[str, float]]:
    found = {}
    for name, seconds, options in [
        ("full", slowly, {}),
        ("async", slowly, {"async_save": True}),
        ("stalled", stalling, {"timeout": timedelta(seconds=60)}),
    ]:
        trainer, module = _trained(**options)
        found[name] = _said(seconds, lambda trainer=trainer, name=name: trainer.save_checkpoint(f"{home}/{name}.ckpt"))
        close(module)
    assert Path(f"{home}/full.ckpt").stat().st_size == Path(f"{home}/async.ckpt").stat().st_size
    return found


@contextmanager
def slow_folder(seconds: Callable[[int], float]) -> Iterator[None]:
    """Of sharded saves, on rank 1 alone."""
    create = LocalFolder.create

    def opened(self: LocalFolder, name: str) -> Any:
        return Slow(create(self, name), seconds if int(os.environ["RANK"]) else lambda call: 0.0)

    with patch.object(LocalFolder, "create", opened):
        yield


def _at_first(call: int) -> float:
    return 1.0 if call <= 8 else 0.0


@forked_writers(partial(slow_folder, _at_first))
def _saved_beside(home: str) -> dict[str, tuple[str, float]]:
    """Rank 0's writer has ended long before rank 1's."""
    options = OPTIONS | {"state_dict_type": "sharded", "async_save": True}
    trainer = make_trainer(
        "eager", callbacks=[SavesAfter(1, f"{home}/beside")], strategy=ZeroStrategy(**arguments(**options))
    )
    module = Regression()
    with slow_folder(_at_first):
        found = _said(lambda call: 0.0, lambda: trainer.fit(module, make_loader("eager", steps=2)))
    close(module)
    assert read_whole(f"{home}/beside", None)["global_step"] == 1
    return {"beside": found}


def _exported(home: str) -> dict[str, tuple[str, float]]:
    _, module = _trained()
    found = {"exported": _said(slowly, lambda: lightning_zero.export_safetensors(module, home, max_shard_size="1GB"))}
    close(module)
    return found


def _of_fabric(home: str) -> dict[str, tuple[str, float]]:
    fabric = make_fabric("eager", **OPTIONS)
    model, optimizer = set_up(fabric, network())
    with closing(model):
        train(fabric, model, optimizer, 2)
        content = {"model": model, "optimizer": optimizer}
        return {"fabric": _said(slowly, lambda: fabric.save(f"{home}/fabric.ckpt", content))}


def _gathered(home: str) -> dict[str, tuple[str, float]]:
    """As from a device, whose copies take rank 0 long."""
    trainer, module = _trained()
    original = full.gather_value

    def late(*args: Any) -> Any:
        time.sleep(0.25 if dist.get_rank() == 0 else 0)
        return original(*args)

    with patch.object(full, "gather_value", late):
        found = {"gathered": _said(lambda call: 0.0, lambda: trainer.save_checkpoint(f"{home}/gathered.ckpt"))}
    close(module)
    return found


def _all(home: str) -> dict[str, tuple[str, float]]:
    return _saved_beside(home) | _saved(home) | _exported(home) | _of_fabric(home) | _gathered(home)


@pytest.fixture(scope="module")
def found(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, float]]]:
    """By rank and case, what was said, and how long it took."""
    return ranks.run(2, _all, str(tmp_path_factory.mktemp("saves")), deadline=240)


def test_a_writer_beside_training_is_waited_for_while_it_goes_on(found: Any) -> None:
    for text, seconds in (found["beside"] for found in found):
        assert seconds > TIMEOUT_S, "it did not take long enough to show anything"
        assert "No progress" not in text, text


WRITES = {"full": "Saving", "async": "Saving", "fabric": "Saving", "exported": "Exporting weights to"}


@pytest.mark.parametrize("case", WRITES)
def test_while_bytes_move_nobody_is_alarmed_or_ended(found: Any, case: str) -> None:
    for rank, (text, seconds) in enumerate(found[case] for found in found):
        assert seconds > TIMEOUT_S, "it did not take long enough to show anything"
        assert "No progress" not in text, text
        lines = [line for line in text.splitlines() if "this rank has written" in line]
        assert (len(lines) > 2) == (rank == 0), text
        assert all(line.startswith(WRITES[case]) for line in lines)


def test_who_gathers_says_so(found: Any) -> None:
    (first, _), (second, _) = (found["gathered"] for found in found)
    assert "Gathering the state of AdamW: this rank has gathered" in first
    assert "this rank has" not in second
    assert "No progress" not in first + second


def test_where_nothing_moves_the_writer_is_named_with_what_it_writes(found: Any) -> None:
    (writer, _), (waiting, _) = (found["stalled"] for found in found)
    for text in (writer, waiting):
        assert text.count("No progress") == 1, text
        assert "stalled.ckpt (0.00 of 0.00 GiB written)" in text
    assert "No progress. This is rank 0: " in writer
    assert "Missing: rank 0. The others: rank 0: " in waiting
    assert "tries to save the checkpoint " in waiting.partition("The others")[2]
