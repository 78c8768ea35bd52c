"""Test that patches of Lightning change nothing for other strategies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from lightning_zero import ZeroStrategy
from lightning_zero.integrations.trainer import checkpoint_lookup


@pytest.mark.parametrize(
    "strategy", [DDPStrategy(), SingleDeviceStrategy(), ZeroStrategy()], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("word", ["last", "best", "a.ckpt"])
def test_where_there_is_no_last_checkpoint_other_strategies_begin_anew(
    strategy: Strategy, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_lookup, "_replace_broken_last", lambda trainer: "another.ckpt")

    def parse(self: Any, state_fn: Any, ckpt_path: Any) -> None:
        """Finds nothing, as Lightning's."""

    found = checkpoint_lookup._find_last(parse)(SimpleNamespace(trainer=SimpleNamespace(strategy=strategy)), None, word)
    ours = isinstance(strategy, ZeroStrategy) and word == "last"
    assert found == ("another.ckpt" if ours else None)
