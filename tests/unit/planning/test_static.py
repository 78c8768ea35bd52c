"""Bytes that stay on a rank, on paper."""

import pytest
import torch
from torch import nn

from lightning_zero.planning.persistent_memory import cut, persistent_bytes
from tests.helpers.options import config


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200), nn.Linear(200, 7))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("inside", [1, 4])
def test_a_host_with_a_replica_holds_what_it_would_alone(stage: int, inside: int) -> None:
    options = {"stage": stage, "compute_dtype": torch.bfloat16}
    cuts = cut(model(), inside)
    alone = persistent_bytes(cuts, config(**options))
    one_of_three = persistent_bytes(cuts, config(replicate_over="hosts", **options), hosts=3)
    assert one_of_three == alone
    together = persistent_bytes(cut(model(), 3 * inside), config(**options), hosts=3)
    assert together["master_shard"] < 0.5 * alone["master_shard"]


def test_gradients_that_wait_for_the_last_micro_batch_are_a_hosts() -> None:
    cuts = cut(model(), 4)
    once = persistent_bytes(cuts, config(replicate_over="hosts", reduce_across="step"), hosts=3, accumulate=2)
    assert once["deferred_gradient"] == once["gradient"]
    whole = persistent_bytes(cuts, config(replicate_over="hosts", stage=1), hosts=3, accumulate=2)
    assert whole["deferred_gradient"] == 4 * once["gradient"]
    each = persistent_bytes(cuts, config(replicate_over="hosts"), hosts=3, accumulate=2)
    assert each["deferred_gradient"] == 0
