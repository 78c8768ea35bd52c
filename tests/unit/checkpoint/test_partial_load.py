"""Whoever goes on after a load that ended half way has been told."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_zero.checkpoint.manager import PartialLoad


class Broken(Exception):
    pass


@pytest.fixture
def hooks() -> Any:
    return SimpleNamespace(loaded_bytes=100)  # by loads before


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Broken])
def test_weights_that_are_replaced_in_part_are_told_of(
    hooks: Any, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    halfway = PartialLoad(hooks)
    with caplog.at_level(logging.ERROR), pytest.raises(kind), halfway.watch_weights("x.ckpt"):
        hooks.loaded_bytes += 4
        raise kind
    assert halfway.message is not None
    assert f"Loading x.ckpt ended half way ({kind.__name__}): some weights" in halfway.message
    assert [record.getMessage() for record in caplog.records] == [halfway.message]


def test_where_nothing_was_replaced_there_is_nothing_to_tell(hooks: Any, caplog: pytest.LogCaptureFixture) -> None:
    halfway = PartialLoad(hooks)
    with pytest.raises(Broken), halfway.watch_weights("x.ckpt"):
        raise Broken
    assert halfway.message is None
    assert not caplog.records


def test_weights_without_their_optimizer_are_told_of_until_others_are_loaded(hooks: Any) -> None:
    halfway = PartialLoad(hooks)
    with pytest.raises(Broken), halfway.watch_optimizers("x.ckpt"):
        raise Broken
    assert halfway.message is not None
    assert "the optimizer's state is not" in halfway.message
    with halfway.watch_weights("y.ckpt"):
        hooks.loaded_bytes += 4
    assert halfway.message is None
