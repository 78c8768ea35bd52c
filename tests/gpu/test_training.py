"""Results of gloo hold on NCCL.

Shards train like the plain model, compiled or not, and release their memory.
"""

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch

from lightning_zero.engine import Engine
from tests.helpers.models import build, make_batches
from tests.helpers.options import config
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import adamw, train_plain, train_sharded
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(2)
BF16 = torch.bfloat16
STEPS, SAMPLES = 6, 8


def move(batch, device):
    return torch.utils._pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, batch)


def train_both(case: str, backend: str, mixed: bool, by: str = "auto", **compile):
    device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cuda.matmul.allow_tf32 = False
    chosen = config(
        compile=backend != "eager",
        compile_backend=backend if backend != "eager" else "inductor",
        gather_group_mb=0.02,
        reduce_bucket_mb=0.01,
        reduce_dtype="bf16" if mixed else None,
        compute_dtype=BF16 if mixed else None,
        gather_transport=by if mixed else "auto",
        reduce_transport=by,
        **compile,
    )
    context = partial(torch.autocast, "cuda", BF16, cache_enabled=False) if mixed else nullcontext
    batches = [move(batch, device) for batch in make_batches(case, STEPS, SAMPLES)]
    plain = build(case).to(device)
    with context():
        expected = train_plain(plain, batches, adamw(plain), world=2, clip_norm=0.25)
    model = build(case)
    engine = Engine(device, chosen)
    try:
        engine.shard(model)
        got = train_sharded(engine, model, batches, adamw(model), clip_norm=0.25, context=context)
        return got, expected, engine.executor.counters()
    finally:
        engine.close()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("case", ["OddMLP", "TiedTransformer", "TwelveBlocks", "LoRA"])
def test_shards_train_like_the_plain_model(ranks: Ranks, case: str, backend: str) -> None:
    for got, expected, counters in ranks.run(2, train_both, case, backend, False, backend="nccl", deadline=200):
        assert_close_relative(got.losses, expected.losses, 1e-5, what="losses")
        assert_close_relative(got.grads[0], expected.grads[0], 1e-5, atol=1e-6, what="gradients")
        assert_close_relative(got.grad_norms, expected.grad_norms, 1e-4, what="norms")
        assert_close_relative(got.params, expected.params, 1e-4, what="parameters")
        assert counters["flushes"] >= STEPS


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_bf16_mixed_follows_the_plain_model(ranks: Ranks, backend: str) -> None:
    for got, expected, _ in ranks.run(2, train_both, "TiedTransformer", backend, True, backend="nccl", deadline=200):
        assert_close_relative(got.losses, expected.losses, 1e-2, what="losses")
        assert_close_relative(got.grad_norms, expected.grad_norms, 2e-2, what="norms")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", ["TiedTransformer", "TwelveBlocks"])
def test_copies_between_gpus_are_as_good_as_collectives(ranks: Ranks, case: str, backend: str) -> None:
    options = {"backend": "nccl", "deadline": 200}
    collective = ranks.run(2, train_both, case, backend, True, "collective", **options)
    copied = ranks.run(2, train_both, case, backend, True, "copy", **options)
    for (mine, _, counters), (theirs, _, before) in zip(copied, collective, strict=True):
        assert counters["copied_weights"] > 0
        assert counters["prefetched_groups"] > 0
        assert "copied_weights" not in before
        assert_close_relative(mine.losses, theirs.losses, 1e-2, what="losses")
        assert_close_relative(mine.grads[0], theirs.grads[0], 2e-2, atol=1e-5, what="gradients")
        assert_close_relative(mine.grad_norms, theirs.grad_norms, 2e-2, what="norms")


def train_with_kept_weights(case: str, backend: str, unsharded_cache_until: str):
    with patch("lightning_zero.compile.context.SMALL_BYTES", 256):
        return train_both(
            case, backend, False, unsharded_cache_mb=float("inf"), unsharded_cache_until=unsharded_cache_until
        )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("until", ["backward", "step"])
def test_kept_weights_train_like_the_plain_model(ranks: Ranks, backend: str, until: str) -> None:
    results = ranks.run(2, train_with_kept_weights, "TiedTransformer", backend, until, backend="nccl", deadline=200)
    for got, expected, counters in results:
        assert_close_relative(got.losses, expected.losses, 1e-5, what="losses")
        assert_close_relative(got.grads[0], expected.grads[0], 1e-5, atol=1e-6, what="gradients")
        assert_close_relative(got.params, expected.params, 1e-4, what="parameters")
        assert (counters.get("cached_gathers", 0) > 0) == (until == "step")


def gathered_memory():
    """Return bytes allocated after training steps, with few and with many layers, beyond those of shards and gradients."""
    device = torch.device("cuda", torch.cuda.current_device())
    left = []
    for layers in (4, 12):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
        engine = Engine(device, config(reduce_bucket_mb=4, compile_backend="aot_eager", gather_group_mb=4))
        engine.shard(model)
        x = torch.randn(8, 1024, device=device)
        for step in range(3):
            if step == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            with engine.train_step():
                loss = model(x).square().mean()
            loss.backward()
        torch.cuda.synchronize()
        left.append(torch.cuda.max_memory_allocated() - before)
        engine.close()
        del engine, model, loss
    return left


def test_peak_memory_beyond_shards_does_not_grow_with_layers(ranks: Ranks) -> None:
    for few, many in ranks.run(2, gathered_memory, backend="nccl", deadline=200):
        weight = 4 * 1024 * 1024
        assert many - few < 2 * weight, (few, many)
