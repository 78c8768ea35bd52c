"""What an optimizer will keep, in bytes, as it would keep it."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import Tuning
from lightning_zero.errors import UnsupportedError
from lightning_zero.planning.estimate_training import Training, plan
from lightning_zero.planning.persistent_memory import cut, measure_optimizer_memory
from tests.helpers.optimizer_steps import Lion


def kept(make: Any, narrow: bool) -> Any:
    module = nn.Linear(64, 64)
    params = list(module.parameters())
    return measure_optimizer_memory([make(params)], params, cut(module, 2), narrow)


@pytest.mark.parametrize(
    ("make", "wide", "narrow", "words"),
    [
        (torch.optim.AdamW, 2 * 4 * 2080 + 2 * 4, 2 * (2 * 2048 + 4 * 32) + 2 * 4, "exp_avg 2, exp_avg_sq 2"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), 4 * 2080, 2 * 2048 + 4 * 32, "momentum_buffer 2"),
        (Lion, 4 * 2080, 4 * 2080, "average 4"),  # whose rule is not known: an engine refuses it
    ],
)
def test_narrow_state_is_counted_where_a_parameter_is_large_enough(
    make: Any, wide: int, narrow: int, words: str
) -> None:
    assert kept(make, False).states == wide
    assert kept(make, True).states == narrow
    assert kept(make, True).words == words


def test_a_plan_counts_it_by_the_option() -> None:
    module = nn.Linear(64, 64)
    training = Training(lambda m, x: m(x).sum(), torch.optim.AdamW)
    plans = [
        plan(module, torch.zeros(2, 64), 2, training=training, tuning=Tuning(state_dtype=dtype))
        for dtype in (None, "bf16")
    ]
    assert [found.roles["optimizer_state"] for found in plans] == [16648, 8456]


def test_a_plan_counts_what_lies_on_the_host_by_the_option() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))  # of which the matrix leaves
    training = Training(lambda m, x: m(x).sum(), torch.optim.AdamW)
    here, state, both = (
        plan(module, torch.zeros(2, 64), 2, training=training, offload=offload)
        for offload in ((), ("optimizer",), ("optimizer", "parameters"))
    )
    shards, vectors = 4 * (2048 + 3 * 32), 4 * 3 * 32
    assert [found.roles["master_shard"] for found in (here, state, both)] == [shards, shards, vectors]
    assert [found.roles["optimizer_state"] for found in (here, state, both)] == [2 * shards + 4 * 4, 0, 0]
    assert here.roles["offload_buffers"] == 0
    assert both.roles["offload_buffers"] - state.roles["offload_buffers"] == shards - vectors
    assert both.roles["compute_copy"] == here.roles["compute_copy"] > 0
    with pytest.raises(UnsupportedError, match="with this precision"):
        plan(module, torch.zeros(2, 64), 2, precision="32-true", offload=("optimizer", "parameters"))
    with pytest.raises(UnsupportedError, match=r"over several hosts \(2 here\)"):
        plan(module, torch.zeros(2, 64), 16, training=training, offload=("optimizer", "parameters"))
