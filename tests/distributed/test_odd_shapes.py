"""Parameters that do not divide by the number of ranks, or hardly exist, and the values in their padding."""

from typing import Any

import pytest
import torch

from tests.helpers.models import CASES, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative, train_reference
from tests.helpers.sharded import EAGER, adamw, engine_for, sgd, train_sharded, whole_state
from tests.ranks.pool import Ranks

STEPS, SAMPLES, CLIP = 8, 12, 0.1


def train(case: str, backend: str) -> tuple[Reference, dict[str, Any]]:
    """Return the trained weights, the number of buckets, and the values between parameters in flat buffers.

    Other code checks the padding of each weight, gradient and state.
    """
    model = build(case)
    # Several buckets, which take turns in the same memory.
    with engine_for(model, backend, reduce_bucket_mb=0.0003) as engine:
        optimizer = optimizer_of(case)(model)
        out = train_sharded(engine, model, make_batches(case, STEPS, SAMPLES), optimizer, clip_norm=CLIP)
        state = whole_state(engine, optimizer)
        spare = {}
        for name, arena in (("weights", engine.sharder.memory.shards), ("gradients", engine.sharder.memory.gradients)):
            values = sum(int(torch.count_nonzero(flat)) for flat in arena.flat.values())
            room = sum(len(range(*record.layout.shard_range(engine.rank))) for record in engine.sharder.live)
            spare[name] = values <= room
        return out, {"buckets": engine.executor.counters()["buckets"], "state": sorted(state), "spare": spare}


def optimizer_of(case: str) -> Any:
    """Adam would make whole steps out of how bfloat16 is rounded."""
    return sgd if case == "MixedDtypes" else adamw


@pytest.mark.parametrize(
    ("world_size", "backend"), [*((world_size, EAGER) for world_size in (1, 2, 3)), (3, "aot_eager")]
)
@pytest.mark.parametrize("case", ["OddMLP", "NonContiguous", "MixedDtypes"])
@pytest.mark.exhaustive_variants(
    "NonContiguous-3-aot_eager", "MixedDtypes-3-aot_eager", "NonContiguous-3-eager", "MixedDtypes-2-eager"
)
def test_odd_parameters_train_as_in_one_process_and_padding_stays_zero(
    ranks: Ranks, world_size: int, case: str, backend: str
) -> None:
    expected = train_reference(
        build(case), make_batches(case, STEPS, SAMPLES), optimizer_of(case), world=world_size, clip_norm=CLIP
    )
    assert min(expected.grad_norms) > CLIP
    kept = ("momentum_buffer",) if case == "MixedDtypes" else ("exp_avg", "exp_avg_sq")
    for out, more in ranks.run(world_size, train, case, backend):
        assert more["buckets"] > 1
        assert more["state"] == sorted(f"{name}.{key}" for name, _ in build(case).named_parameters() for key in kept)
        assert more["spare"] == {"weights": True, "gradients": True}
        if case == "MixedDtypes":
            compare_mixed(out, expected)
            continue
        assert_close_relative(out.losses, expected.losses, 1e-6, what="losses")
        assert_close_relative(out.grads, expected.grads, 3e-6, what="grads")
        # A bias of one element may pass through zero with the rounding of its former size.
        assert_close_relative(out.params, expected.params, 1e-6, atol=2e-8, what="params")
        assert_close_relative(out.grad_norms, expected.grad_norms, 1e-6, what="norms")


def compare_mixed(out: Reference, expected: Reference) -> None:
    """The ranks' parts of a bfloat16 gradient are rounded before they are added, and the norm to clip by is in
    bfloat16, the oracle's in float32.
    """
    assert_close_relative(out.losses, expected.losses, 5e-5, what="losses")
    assert_close_relative(out.grad_norms, expected.grad_norms, 2e-3, what="norms")
    wide = [name for name, param in expected.params[0].items() if param.dtype == torch.float32]
    assert 0 < len(wide) < len(expected.params[0])
    for name in expected.params[0]:
        for what, rtol in (("grads", 2e-3 if name in wide else 1e-2), ("params", 2e-4 if name in wide else 1e-3)):
            mine, theirs = ([step[name] for step in getattr(record, what)] for record in (out, expected))
            assert_close_relative(mine, theirs, rtol, what=f"{what} of {name}")


def test_the_cases_are_odd() -> None:
    shapes = [param.shape for param in CASES["OddMLP"]().parameters()]
    assert any(shape == () for shape in shapes)
    assert any(shape.numel() == 0 for shape in shapes)
    assert any(shape.numel() == 2 for shape in shapes)
    assert any(shape.numel() % 2 and shape.numel() % 3 and shape.numel() > 3 for shape in shapes)
