"""Gradients that lie where the compute copies of their weights lay: training is what it is with rounded gradients, and
what would read them as weights is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import engine_of
from lightning_zero.report.readings import memory_by_role
from tests.helpers.checkpointed import NonReentrant, Reentrant
from tests.helpers.in_parts import FrozenEncoder, OtherHeads, Parts
from tests.helpers.models import Case, OneLayer, TiedLayer, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative, shard_batch
from tests.helpers.sharded import adamw, engine_for, train_sharded, whole_params
from tests.ranks.pool import RankFailure, Ranks

BF16 = torch.bfloat16
STEPS, SAMPLES = 8, 12
BASE: dict[str, Any] = {"compute_dtype": BF16, "reduce_dtype": BF16, "gather_group_mb": 0.01}
COLLECTIVES = {"gather_transport": "collective", "reduce_transport": "collective"}
REPLAYED = {"emulate_cuda_graph_model": True, "emulate_cuda_graph_step": True}
COPIES = REPLAYED | {"reduce_transport": "copy"}
ON_HOST = {"offload": ("optimizer",), "offload_buffer_mb": 0.001}
WAYS: dict[str, tuple[int, type[Case], dict[str, Any]]] = {
    "one rank": (1, OneLayer, REPLAYED),
    "by copies": (2, OneLayer, {}),
    "by collectives": (3, OneLayer, COLLECTIVES),
    "gradients by copies": (2, OneLayer, {"gather_transport": "collective", "reduce_transport": "copy"}),
    "poisoned": (2, OneLayer, {"poison": True}),
    "reduced in float32": (3, OneLayer, {"reduce_dtype": None}),
    "replayed": (3, OneLayer, COPIES),
    "replayed, by collectives": (2, OneLayer, REPLAYED | COLLECTIVES),
    "replayed, state on the host": (2, OneLayer, COPIES | ON_HOST),
    "state on the host": (2, OneLayer, ON_HOST),
    "narrow state": (2, OneLayer, COPIES | {"state_dtype": "bf16"}),
    "stage 2": (2, OneLayer, {"stage": 2}),
    "kept until backward": (2, OneLayer, {"resident_mb": float("inf")}),
    "a tied weight": (2, TiedLayer, COPIES),
    "modules one after another": (2, Parts, COPIES),
    "heads in turn": (2, OtherHeads, {}),
    "a frozen encoder": (2, FrozenEncoder, COPIES),
    "checkpointed": (2, NonReentrant, COPIES),
    "checkpointed, by the reentrant way": (2, Reentrant, {}),
}
TRANSPORTS: dict[str, dict[str, Any]] = {"copies": {}, "collectives": COLLECTIVES, "replayed": COPIES}
autocast = partial(torch.autocast, "cpu", BF16, cache_enabled=False)


def train(
    over: bool,
    case: type[Case],
    before_batch: Callable[[nn.Module, int], None] | None = None,
    clip: float | None = None,
    **options: Any,
) -> tuple[Reference, dict[str, int], set[torch.dtype]]:
    """What the training recorded, whose gradients were rounded; memory by role; and the gradients' dtypes."""
    torch.manual_seed(17)
    model: Any = build(case)
    dtypes: set[torch.dtype] = set()

    def round_gradient(param: Tensor) -> None:
        assert param.grad is not None
        dtypes.add(param.grad.dtype)
        param.grad.copy_(param.grad.to(BF16))

    with engine_for(model, gradients_over_copies=over, **(BASE | options)) as engine:
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(round_gradient)
        made, batches = adamw(model), make_batches(case, STEPS, SAMPLES)
        got = train_sharded(engine, model, batches, made, context=autocast, before_batch=before_batch, clip_norm=clip)
        assert all(param.grad is None for param in model.parameters())
        return got, memory_by_role(engine, [made]), dtypes


def both(case: type[Case], options: dict[str, Any], before_batch: Any = None) -> list[Any]:
    return [train(over, case, before_batch, **options) for over in (True, False)]


def check(over: Reference, plain: Reference, rtol: float = 1e-6) -> None:
    for what in ("losses", "grads", "grad_norms", "params"):
        assert_close_relative(getattr(over, what), getattr(plain, what), rtol, what=what)


@pytest.mark.parametrize("way", WAYS)
def test_training_is_what_it_is_with_rounded_gradients(ranks: Ranks, way: str) -> None:
    world, case, options = WAYS[way]
    for (over, less, dtypes), (plain, more, _) in ranks.run(world, both, case, options):
        check(over, plain)
        assert dtypes == {BF16}
        assert (less["gradient"], more["gradient"] > 0) == (0, True)
        assert all(less[role] == more[role] for role in ("master_shard", "compute_copy", "optimizer_state"))


def test_clipped_gradients_are_rounded_once_more_by_a_step_that_is_not_replayed(ranks: Ranks) -> None:
    for (over, *_), (plain, *_) in ranks.run(2, both, OneLayer, COPIES | {"clip": 0.1}):
        assert min(plain.grad_norms) > 0.1
        assert_close_relative(over.losses, plain.losses, 1e-3, what="losses")
        assert_close_relative(over.params, plain.params, 1e-2, what="params")


def evaluate(model: nn.Module, index: int) -> Tensor:
    engine = engine_of(model)
    assert engine is not None
    engine.eval_step()
    with torch.no_grad(), autocast():
        out: Tensor = model(torch.zeros(5, 8, dtype=torch.int64))
    engine.cycle.after_eval()
    return out


def backward(model: Any, index: int) -> None:
    """Of another batch than those that are trained with."""
    engine = engine_of(model)
    assert engine is not None
    with engine.train_step(), autocast():
        loss = model.loss(shard_batch(model.make_batch(99 + index, SAMPLES), engine.rank, engine.world_size))
    loss.backward()


def whatever(model: Any, index: int) -> None:
    """Comes between steps: evaluations, gradients that come and are dropped, both, and an edit of a weight."""
    if index % 2:
        evaluate(model, index)
    if index in (1, 4, 6):
        backward(model, index)
        model.zero_grad()
    if index == 6:
        evaluate(model, index)
    if index in (2, 7):
        with torch.no_grad():
            model.head.weight.mul_(0.9)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_copies_are_weights_again_whatever_comes_between_steps(ranks: Ranks, transport: str) -> None:
    for (over, *_), (plain, *_) in ranks.run(2, both, OneLayer, TRANSPORTS[transport], whatever):
        check(over, plain)


def up_to_a_backward(options: dict[str, Any], then: Callable[[Any, Tensor], None]) -> None:
    """``then`` is called with a model whose gradients wait for their step, and what an evaluation gave before."""
    torch.manual_seed(17)
    model: Any = build(OneLayer)
    with engine_for(model, gradients_over_copies=True, **(BASE | options)) as engine:
        optimizer = adamw(model)
        for index in range(5):
            backward(model, index)
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            before = evaluate(model, index)
        backward(model, 5)
        then(model, before)


def another_backward(model: Any, before: Tensor) -> None:
    backward(model, 6)


def gradient_of_the_users(model: Any, before: Tensor) -> None:
    model.zero_grad()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    backward(model, 6)


def another_loss(model: Any, before: Tensor) -> None:
    model.zero_grad()
    with engine_of(model).train_step(), autocast():  # type: ignore[union-attr]
        losses = [model.loss(model.make_batch(seed, SAMPLES)) for seed in (3, 4)]
    for loss in losses:
        loss.backward()


REFUSED = [
    *((transport, another_backward) for transport in TRANSPORTS),
    ("copies", gradient_of_the_users),
    ("copies", another_loss),
]


@pytest.mark.parametrize(("transport", "what"), REFUSED)
def test_who_needs_weights_before_the_step_is_told_what_to_do(ranks: Ranks, transport: str, what: Any) -> None:
    with pytest.raises(RankFailure, match="is needed once more while its gradient waits for the optimizer's step"):
        ranks.run(2, up_to_a_backward, TRANSPORTS[transport], what)


def evaluation_is_right_or_refused(model: Any, before: Tensor) -> None:
    weights = whole_params(engine_of(model), model)  # type: ignore[arg-type]
    try:
        after = evaluate(model, 5)
    except ValueError as error:
        assert "while its gradient waits" in str(error)  # noqa: PT017 - it may be right, too
    else:
        assert torch.equal(before, after)
    assert_close_relative(whole_params(engine_of(model), model), weights, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_evaluation_before_the_step_is_right_or_refused(ranks: Ranks, transport: str) -> None:
    ranks.run(2, up_to_a_backward, TRANSPORTS[transport], evaluation_is_right_or_refused)
