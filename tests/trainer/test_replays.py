"""Replay forward and backward through the Trainer (emulated on a CPU); drop gradients in between."""

from typing import Any

import pytest

from lightning_zero import ZeroStrategy
from tests.helpers.marks import how_seldom
from tests.helpers.options import arguments
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL
from tests.helpers.ways import PARTS, WAYS, fit
from tests.ranks.pool import Ranks

FAST = ("losses kept", "accumulated and clipped")
VALIDATED = (*FAST, "saved and validated", "weights averaged")  # evaluations are compiled, too
# The first is part of others; the engine's own, in tests/distributed/test_replays.py, show the rest.
ELSEWHERE = ("plain", "kept until the step", "activations checkpointed", "batch norm")
EXHAUSTIVE = (
    *("checkpointed by the reentrant way", "predictions in between", "weights averaged", "unfrozen later"),
    *("anomalies looked for", "accumulated more later", "batches skipped"),
)


class Emulated(ZeroStrategy):
    def __init__(self, **options: Any) -> None:
        super().__init__(**arguments(compile_backend="aot_eager", emulate_cuda_graph_model=True, **options))


def fit_both(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    way, validated = WAYS[name], name in VALIDATED
    expected = fit(name, None if way.ddp else ZeroStrategy(compile=False), validated)
    return fit(name, Emulated(**way.strategy), validated), expected


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=how_seldom(name, FAST, EXHAUSTIVE))
        for name, way in WAYS.items()
        if way.emulated and name not in ELSEWHERE
    ],
)
def test_replayed_steps_train_and_log_like_ddp(ranks: Ranks, name: str) -> None:
    for replayed, expected in ranks.run(2, fit_both, name, deadline=120):
        for part in PARTS:
            assert_close_relative(replayed[part], expected[part], RTOL, what=part)
        # Both ways in which gradients can be met have warmed up by the second epoch.
        assert replayed["replays"] >= (WAYS[name].replays or 0)
