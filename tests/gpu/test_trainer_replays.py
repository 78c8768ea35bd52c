"""Users' code around training steps has the same results with replays and with runs."""

from typing import Any

import pytest

from lightning_zero import ZeroStrategy
from tests.helpers.options import arguments
from tests.helpers.oracle import assert_close_relative
from tests.helpers.ways import PARTS, WAYS, fit
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(2)


def fit_both(name: str) -> list[dict[str, Any]]:
    wanted = True if WAYS[name].replays else "auto"  # True raises with the reason where nothing can be captured
    options = WAYS[name].strategy
    strategies = [
        ZeroStrategy(**arguments(compile_backend="aot_eager", cuda_graph_model=c, **options)) for c in (wanted, False)
    ]
    return [fit(name, strategy, accelerator="gpu", precision="bf16-mixed") for strategy in strategies]


@pytest.mark.parametrize("name", WAYS)
def test_replayed_steps_train_and_log_like_those_that_run(ranks: Ranks, name: str) -> None:
    for replayed, ran in ranks.run(2, fit_both, name, backend="cpu:gloo,cuda:nccl", deadline=150):
        for part in PARTS:
            assert_close_relative(replayed[part], ran[part], 1e-2 if WAYS[name].twice else 1e-3, what=part)
        least = WAYS[name].replays
        if least is not None:
            assert replayed["replays"] >= least if least else replayed["replays"] == 0
        assert ran["replays"] == 0
