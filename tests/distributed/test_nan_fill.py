"""Test that no code reads a weight or a gradient before it arrives or after its release.

It would read NaN.
"""

from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers.models import Case, TiedLayer, build, make_batches
from tests.helpers.oracle import Reference, assert_same_bits
from tests.helpers.sharded import EAGER, engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks

BF16 = torch.bfloat16
PLAIN: dict[str, Any] = {"gather_group_mb": 0.001}
CACHED = PLAIN | {"unsharded_cache_mb": 0.02}
STEP = PLAIN | {"unsharded_cache_mb": 0.015, "unsharded_cache_until": "step"}


def with_and_without(case: str | type[Case], backend: str, options: dict[str, Any], mixed: bool) -> list[Reference]:
    context = partial(torch.autocast, "cpu", BF16, enabled=mixed, cache_enabled=False)
    dtypes: dict[str, Any] = {"compute_dtype": BF16, "reduce_dtype": BF16} if mixed else {}
    out = []
    for nan_fill in (False, True):
        torch._dynamo.reset()
        model = build(case)
        with engine_for(model, backend, nan_fill=nan_fill, **dtypes, **options) as engine:
            batches = make_batches(case, 4, 12)
            out.append(train_sharded(engine, model, batches, sgd(model), accumulate=2, context=context))
    return out


@pytest.mark.parametrize(
    ("case", "backend", "options", "mixed"),
    [
        ("LoRA", "aot_eager", PLAIN, True),
        ("OddMLP", "aot_eager", CACHED, False),
        (TiedLayer, "aot_eager", STEP, True),
        pytest.param("CalledTwice", "aot_eager", {"prefetch": False}, False, marks=pytest.mark.slow),
        ("OddMLP", EAGER, {}, False),
        ("NeverUsed", "aot_eager", PLAIN, False),
    ],
    ids=["groups", "kept for backward", "kept for the step", "one by one", "eager", "no gradients"],
)
@pytest.mark.exhaustive_variants("kept for the step", "one by one")
def test_results_are_the_same_to_the_bit(
    ranks: Ranks, case: str | type[Case], backend: str, options: dict[str, Any], mixed: bool
) -> None:
    for plain, filled in ranks.run(2, with_and_without, case, backend, options, mixed, deadline=240):
        assert_same_bits(filled, plain)


def read_before_waiting() -> tuple[bool, bool, bool]:
    """Read too early on purpose, and return True for each NaN."""
    model = build("OddMLP")
    with engine_for(model, EAGER, nan_fill=True) as engine:
        record = engine.sharder.live[0]
        shape, dtype = list(record.layout.shape), record.param.dtype
        whole = torch.ops.lightning_zero.gather_start(record.param.detach(), shape, dtype)
        early = bool(whole.isnan().all())
        ready = torch.ops._c10d_functional.wait_tensor(whole)
        again = torch.ops.lightning_zero.gather(record.param.detach(), shape, dtype)
        return early, bool(ready.isnan().any()), torch.equal(ready, again)


def test_a_weight_that_is_read_too_early_is_nan(ranks: Ranks) -> None:
    for early, late, right in ranks.run(2, read_before_waiting):
        assert early
        assert not late
        assert right
