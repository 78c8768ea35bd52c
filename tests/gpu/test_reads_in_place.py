"""Captured graphs that read shards in place, with changes of weights between steps."""

from typing import Any

import pytest
import torch

from tests.helpers.in_place import train
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(1)


def both(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    device = f"cuda:{torch.cuda.current_device()}"
    return train("inductor", True, options, device), train("inductor", False, options, device)


BF16 = {"compute_dtype": torch.bfloat16}


@pytest.mark.parametrize("options", [{}, {"frozen_dtype": "nf4"}, BF16, {**BF16, "grad_aliasing": True}], ids=str)
def test_changes_between_steps_reach_captured_graphs_that_gather_nothing(ranks: Ranks, options: dict[str, Any]) -> None:
    [(found, copying)] = ranks.run(1, both, options, backend="cpu:gloo,cuda:nccl", deadline=300)
    assert found["losses"] == pytest.approx(copying["losses"], rel=1e-4)
    assert not any(found["gathered"][1:]), found["gathered"]
    assert found["counters"]["replayed_graphs"] > 0
