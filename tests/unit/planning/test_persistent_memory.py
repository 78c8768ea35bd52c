"""Bytes that persist between steps."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import Tuning
from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.state_dtypes import Rounding
from lightning_zero.planning.estimate_training import Training, plan
from lightning_zero.planning.persistent_memory import measure_optimizer_memory, persistent_bytes, shard_parameters
from lightning_zero.sharding.weight_format import packed_words
from tests.helpers.optimizer_steps import Lion
from tests.helpers.options import config


def kept(make: Any, state_dtype: str | None) -> Any:
    module = nn.Linear(64, 64)
    params = list(module.parameters())
    shards = shard_parameters(module, 2, state_blocks=state_dtype == "8bit")
    return measure_optimizer_memory([make(params)], params, shards, Rounding(state_dtype))


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
    assert kept(make, None).states == wide
    assert kept(make, "bf16").states == narrow
    assert kept(make, "bf16").words == words


def test_8_bit_state_is_counted_with_its_scales() -> None:
    found = kept(torch.optim.AdamW, "8bit")
    assert found.states == 2 * (2048 + 2048 // 256 * 4 + 4 * 32) + 2 * 4
    assert found.words == "exp_avg 1.02, exp_avg_sq 1.02"


def test_a_plan_counts_bf16_weights_and_refuses_the_option_without_them() -> None:
    module = nn.Linear(64, 64)
    training = Training(lambda m, x: m(x).sum(), torch.optim.AdamW)
    unit = 2 * (2048 + 64)  # bytes of a rank's shards: the bias has one unit of 64 elements
    for state_dtype, states in ((None, 2 * unit), ("bf16", 2 * unit), ("8bit", 2 * (2048 + 8 * 4 + 2 * 64))):
        tuning = Tuning(bf16_stochastic_round=True, state_dtype=state_dtype)
        found = plan(module, torch.zeros(2, 64), 2, training=training, precision="bf16-true", tuning=tuning)
        assert found.roles["master_shard"] == found.roles["gradient"] == unit
        assert found.roles["compute_shard"] == 0
        assert found.roles["optimizer_state"] == states + 2 * 4
        assert found.temporary == 0
    with pytest.raises(UnsupportedError, match="trained ones are: float32. Pass precision='bf16-true'"):
        plan(module, torch.zeros(2, 64), 2, training=training, tuning=Tuning(bf16_stochastic_round=True))


def test_a_plan_counts_temporary_memory_only_of_an_optimizers_own_steps() -> None:
    module, batch = nn.Linear(64, 64, bias=False), torch.zeros(2, 64)

    def temporary(make: Any, **options: Any) -> int:
        return plan(module, batch, 2, training=Training(lambda m, x: m(x).sum(), make), **options).temporary

    aliased = Tuning(grad_aliasing=True)
    assert temporary(torch.optim.AdamW) == temporary(torch.optim.AdamW, tuning=aliased) == 0
    assert temporary(torch.optim.AdamW, cuda_graphs=False) > 0
    dampened = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    assert temporary(dampened, tuning=aliased) - temporary(dampened) == 4 * 2048  # gradients in float32


def test_a_plan_counts_it_by_the_option() -> None:
    module = nn.Linear(64, 64)
    training = Training(lambda m, x: m(x).sum(), torch.optim.AdamW)
    plans = [
        plan(module, torch.zeros(2, 64), 2, training=training, tuning=Tuning(state_dtype=dtype))
        for dtype in (None, "bf16", "8bit")
    ]
    assert [found.roles["optimizer_state"] for found in plans] == [16648, 8456, 4424]


def test_a_plan_counts_full_updates_of_matrices() -> None:
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    training = Training(lambda m, x: m(x).sum(), lambda params: torch.optim.Muon(list(params)))
    plans = [
        plan(module, torch.zeros(2, 64), 2, training=training, tuning=Tuning(matrix_bucket_mb=size))
        for size in (2 * 4096 / 2**20, 256)
    ]
    matrix = 64 * 64 * 2  # bytes in bfloat16
    # Six buffers of one matrix if there are several buckets, or three of two; in the transform, each matrix four times.
    assert [found.roles["matrix_updates"] for found in plans] == [6 * matrix + 4 * matrix, 3 * 2 * matrix + 8 * matrix]
    assert [found.roles["optimizer_state"] for found in plans] == [4 * 4 * 4096 // 2] * 2


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
    assert both.roles["compute_shard"] == here.roles["compute_shard"] > 0
    with pytest.raises(UnsupportedError, match="with this precision"):
        plan(module, torch.zeros(2, 64), 2, precision="32-true", offload=("optimizer", "parameters"))
    with pytest.raises(UnsupportedError, match=r"over several hosts \(2 here\)"):
        plan(module, torch.zeros(2, 64), 16, training=training, offload=("optimizer", "parameters"))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200), nn.Linear(200, 7))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("inside", [1, 4])
def test_a_host_with_a_replica_holds_what_it_would_alone(stage: int, inside: int) -> None:
    options = {"stage": stage, "compute_dtype": torch.bfloat16}
    shards = shard_parameters(model(), inside)
    alone = persistent_bytes(shards, config(**options))
    one_of_three = persistent_bytes(shards, config(replicate_over="hosts", **options), hosts=3)
    assert one_of_three == alone
    together = persistent_bytes(shard_parameters(model(), 3 * inside), config(**options), hosts=3)
    assert together["master_shard"] < 0.5 * alone["master_shard"]


def test_gradients_that_wait_for_the_last_micro_batch_are_a_hosts() -> None:
    shards = shard_parameters(model(), 4)
    once = persistent_bytes(shards, config(replicate_over="hosts", cross_host_reduce="step"), hosts=3, accumulate=2)
    assert once["deferred_gradient"] == once["gradient"]
    whole = persistent_bytes(shards, config(replicate_over="hosts", stage=1), hosts=3, accumulate=2)
    assert whole["deferred_gradient"] == 4 * once["gradient"]
    each = persistent_bytes(shards, config(replicate_over="hosts"), hosts=3, accumulate=2)
    assert each["deferred_gradient"] == 0


def test_packed_frozen_weights_count_by_their_words() -> None:
    module = nn.Sequential(nn.Linear(256, 256).requires_grad_(False), nn.Linear(256, 256))
    loss = Training(loss=lambda net, batch: net(batch).sum())
    plans = [plan(module, torch.zeros(4, 256), training=loss, frozen_dtype=kind) for kind in (None, "nf4", "int8")]
    plain, *packed = (found.roles for found in plans)
    for kind, roles in zip(("nf4", "int8"), packed, strict=True):
        saved = plain["master_shard"] - roles["master_shard"]
        assert saved == pytest.approx(256 * 256 * 4 - packed_words(256, 256, kind) * 4, abs=128)
        assert plain["compute_shard"] - roles["compute_shard"] == 256 * 256 * 2
    assert len({found.parameters for found in plans}) == 1


def test_frozen_weights_are_neither_reduced_nor_stepped_and_packed_ones_gather_fewer_bytes() -> None:
    module = nn.Sequential(nn.Linear(4096, 4096, bias=False).requires_grad_(False), nn.Linear(4096, 8, bias=False))
    loss = Training(loss=lambda net, batch: net(batch).sum())
    frozen, packed = (
        plan(module, torch.zeros(4, 4096), 2, training=loss, frozen_dtype=kind).seconds for kind in (None, "nf4")
    )
    trained = plan(module.requires_grad_(True), torch.zeros(4, 4096), 2, training=loss).seconds
    assert frozen is not None
    assert packed is not None
    assert trained is not None
    assert frozen.optimizer == packed.optimizer < 0.2 * trained.optimizer
    assert packed.exposed < 0.6 * frozen.exposed < 0.6 * trained.exposed
