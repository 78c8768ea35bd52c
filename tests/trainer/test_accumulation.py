"""Gather weights once for accumulated micro-batches, if they stay until the optimizer step."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_zero.engine import engine_of
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, Regression, close, make_loader, make_strategy, make_trainer, whole_state
from tests.ranks.pool import Ranks

WINDOW, WINDOWS = 3, 4


class Counts(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.gathers: list[int] = []
        self.reductions: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        engine = engine_of(self)
        if engine is not None:
            self.gathers.append(engine.executor.counters().get("cached_gathers", 0))
            self.reductions.append(engine.executor.counters().get("reduce_bytes", 0))


def fit_both(chosen: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[int], list[int]]:
    arguments = {"accumulate_grad_batches": WINDOW, "gradient_clip_val": 0.2}
    plain = Counts()
    make_trainer("ddp", **arguments).fit(plain, make_loader("ddp", WINDOW * WINDOWS))
    ours = Counts()
    strategy = make_strategy("compiled", **chosen)
    with patch("lightning_zero.compile.context.SMALL_BYTES", 0):
        trainer = make_trainer("compiled", strategy=strategy, **arguments)
        trainer.fit(ours, make_loader("compiled", WINDOW * WINDOWS))
    state = whole_state(ours)
    close(ours)
    torch._dynamo.reset()
    return state, whole_state(plain), ours.gathers, ours.reductions


@pytest.mark.parametrize(
    "chosen", [{"reshard_after_forward": False, "unsharded_cache_until": "step"}, {"stage": 1}], ids=["kept", "stage 1"]
)
def test_kept_weights_are_gathered_once_in_a_window(ranks: Ranks, chosen: dict[str, Any]) -> None:
    for state, expected, gathers, reductions in ranks.run(2, fit_both, chosen, deadline=120):
        assert_close_relative(state, expected, RTOL, what="weights")
        windows = [gathers[begin : begin + WINDOW] for begin in range(0, len(gathers), WINDOW)]
        # The first micro-batch of all is eager, the second compiles. Later only a window's first one gathers.
        assert all(len(set(window)) == 1 for window in windows[1:]), gathers
        growth = {after[0] - before[0] for before, after in zip(windows[1:], windows[2:], strict=False)}
        assert len(growth) == 1
        assert min(growth) > 0
        sent = [after - before for before, after in zip([0, *reductions], reductions, strict=False)]
        often = 1 if "stage" in chosen else WINDOW
        assert [reduced > 0 for reduced in sent] == ([False] * (WINDOW - often) + [True] * often) * WINDOWS
