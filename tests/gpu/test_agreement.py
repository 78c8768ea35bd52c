"""Ranks that are about to gather different weights over NCCL raise an error before anything hangs."""

import pytest
import torch

from tests.helpers.forks import run_forks
from tests.ranks.pool import Ranks


def differ() -> tuple[str, float]:
    return run_forks({0: [False, False], 1: [False, True]}, 25.0, {}, f"cuda:{torch.cuda.current_device()}")


@pytest.mark.gpu(2, apart=True)
def test_ranks_that_compile_different_graphs_end_in_a_named_error(ranks: Ranks) -> None:
    for rank, (message, seconds) in enumerate(ranks.run(2, differ, backend="nccl", deadline=120)):
        assert seconds < 30
        assert f"Ranks {rank} and {1 - rank} compiled graphs that gather different weights" in message
