"""Gradients that alias the compute copies of their weights.

Training has the results of rounded gradients, and reads of the weights raise an error.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine, engine_of
from lightning_zero.report.engine_report import memory_by_role
from tests.helpers.checkpointed import NonReentrant, Reentrant
from tests.helpers.in_parts import FrozenEncoder, OtherHeads, Parts
from tests.helpers.models import Case, OneLayer, TiedLayer, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative, shard_batch
from tests.helpers.sharded import adamw, engine_for, train_sharded, whole_params
from tests.ranks.pool import Ranks

BF16 = torch.bfloat16
STEPS, SAMPLES = 8, 12
BASE: dict[str, Any] = {"compute_dtype": BF16, "reduce_dtype": BF16, "gather_group_mb": 0.01}
COLLECTIVES = {"gather_transport": "collective", "reduce_transport": "collective"}
REPLAYED = {"emulate_cuda_graph_model": True, "emulate_cuda_graph_step": True}
COPIES = REPLAYED | {"reduce_transport": "copy"}
ON_HOST = {"offload": ("optimizer",), "offload_buffer_mb": 0.001}
WAYS: dict[str, tuple[int, type[Case], dict[str, Any]]] = {
    "one rank": (1, OneLayer, REPLAYED),
    "by collectives": (3, OneLayer, COLLECTIVES),
    "gradients by copies": (2, OneLayer, {"gather_transport": "collective", "reduce_transport": "copy"}),
    "by copies, poisoned": (2, OneLayer, {"nan_fill": True}),
    "replayed, by collectives": (2, OneLayer, REPLAYED | COLLECTIVES),
    "replayed, state on the host": (2, OneLayer, COPIES | ON_HOST),
    "stage 2": (2, OneLayer, {"stage": 2}),
    "a tied weight, narrow state": (2, TiedLayer, COPIES | {"state_dtype": "bf16"}),
    "modules one after another": (3, Parts, COPIES),
    "heads in turn, state on the host": (2, OtherHeads, ON_HOST),
    "a frozen encoder": (2, FrozenEncoder, COPIES),
    "kept until backward": (2, OneLayer, {"unsharded_cache_mb": float("inf")}),
    "checkpointed": (2, NonReentrant, COPIES),
    "checkpointed by the reentrant way, reduced in float32": (2, Reentrant, {"reduce_dtype": None}),
}
EXHAUSTIVE = ("replayed, by collectives", "checkpointed")
TRANSPORTS: dict[str, dict[str, Any]] = {"copies": {}, "collectives": COLLECTIVES, "replayed": COPIES}
TRIED = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name == "collectives")) for name in TRANSPORTS]
autocast = partial(torch.autocast, "cpu", BF16, cache_enabled=False)


def train(
    over: bool,
    case: type[Case],
    clip: float | None = None,
    **options: Any,
) -> tuple[Reference, dict[str, int], set[torch.dtype]]:
    """Return the record of the training with rounded gradients, memory by role, and the dtypes of gradients."""
    torch.manual_seed(17)
    model: Any = build(case)
    dtypes: set[torch.dtype] = set()

    def look(param: Tensor) -> None:
        assert param.grad is not None
        dtypes.add(param.grad.dtype)
        round_gradient(param)

    with engine_for(model, grad_aliasing=over, **(BASE | options)) as engine:
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(look)
        made, batches = adamw(model), make_batches(case, STEPS, SAMPLES)
        got = train_sharded(engine, model, batches, made, context=autocast, clip_norm=clip)
        assert all(param.grad is None for param in model.parameters())
        return got, memory_by_role(engine, [made]), dtypes


def both(case: type[Case], options: dict[str, Any]) -> list[Any]:
    return [train(over, case, **options) for over in (True, False)]


def check(over: Reference, plain: Reference, rtol: float = 1e-6) -> None:
    for what in ("losses", "grads", "grad_norms", "params"):
        assert_close_relative(getattr(over, what), getattr(plain, what), rtol, what=what)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.exhaustive] * (way in EXHAUSTIVE)) for way in WAYS]
)
@pytest.mark.exhaustive_variants(
    "one rank",
    "gradients by copies",
    "by copies, poisoned",
    "modules one after another",
    "heads in turn, state on the host",
    "a frozen encoder",
    "checkpointed by the reentrant way, reduced in float32",
    "kept until backward",
    "stage 2",
)
def test_training_is_what_it_is_with_rounded_gradients(ranks: Ranks, way: str) -> None:
    world, case, options = WAYS[way]
    for (over, less, dtypes), (plain, more, _) in ranks.run(world, both, case, options):
        check(over, plain)
        assert dtypes == {BF16}
        assert (less["gradient"], more["gradient"] > 0) == (0, True)
        assert all(less[role] == more[role] for role in ("master_shard", "compute_shard", "optimizer_state"))


def test_clipped_gradients_are_rounded_once_more_by_a_step_that_is_not_replayed(ranks: Ranks) -> None:
    for (over, *_), (plain, *_) in ranks.run(2, both, OneLayer, COPIES | {"clip": 0.1}):
        assert min(plain.grad_norms) > 0.1
        assert_close_relative(over.losses, plain.losses, 1e-3, what="losses")
        assert_close_relative(over.params, plain.params, 1e-2, what="params")


def _engine(model: nn.Module) -> Engine:
    engine = engine_of(model)
    assert engine is not None
    return engine


def evaluate(model: nn.Module) -> Tensor:
    engine = _engine(model)
    engine.eval_step()
    with torch.no_grad(), autocast():
        out: Tensor = model(torch.zeros(5, 8, dtype=torch.int64))
    engine.cycle.after_eval()
    return out


def backward(model: Any, index: int) -> None:
    """Return another batch than those of the training."""
    engine = _engine(model)
    with engine.train_step(), autocast():
        loss = model.loss(shard_batch(model.make_batch(99 + index, SAMPLES), engine.rank, engine.world_size))
    loss.backward()


Then = Callable[[Any, Any, Tensor], None]
Trained = tuple[list[dict[str, Tensor]], list[str]]


def up_to_backwards(
    over: bool, options: dict[str, Any], thens: Sequence[Then], refused: Sequence[Then] = ()
) -> Trained:
    """Call each with a model whose gradients wait for their step, its optimizer, and earlier results of an evaluation.

    Return the weights after each, and the errors of those that end in one.
    """
    torch.manual_seed(17)
    model: Any = build(OneLayer)
    weights, errors = [], []
    with engine_for(model, grad_aliasing=over, **(BASE | options)) as engine:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(round_gradient)
        optimizer = adamw(model)
        for index in range(5):
            backward(model, index)
            step(model, optimizer)
            evaluate(model)
        for then in thens:
            before = evaluate(model)
            backward(model, 5)
            then(model, optimizer, before)
            weights.append(whole_params(engine, model))
        for then in refused:
            before = evaluate(model)
            backward(model, 5)
            with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller checks the message
                then(model, optimizer, before)
            errors.append(str(caught.value))
            engine.cycle.reset()
            model.zero_grad()
    return weights, errors


def round_gradient(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.copy_(param.grad.to(BF16))


def step(model: Any, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
    with _engine(model).optimizers.stepping(optimizer, clip=clip):
        optimizer.step()
    optimizer.zero_grad()


def evaluates(model: Any, optimizer: Any, before: Tensor) -> None:
    assert torch.equal(evaluate(model), before)
    step(model, optimizer)


def one_rank_evaluates(model: Any, optimizer: Any, before: Tensor) -> None:
    """The case of ranks that take turns; others act together."""
    model.zero_grad()
    if _engine(model).rank == 0 or _engine(model).config.tuning.gather_transport == "collective":
        assert torch.equal(evaluate(model), before)
    backward(model, 6)
    step(model, optimizer)


def drops_gradients(model: Any, optimizer: Any, before: Tensor) -> None:
    """Run each directly before a step, after an evaluation, and after dropped gradients."""
    for index, evaluated in enumerate((False, True, True)):
        model.zero_grad()
        if index == 2:
            backward(model, 7)
            model.zero_grad()
        if evaluated:
            evaluate(model)
        backward(model, index)
        step(model, optimizer)
        backward(model, 8)
    step(model, optimizer)


def edits_a_weight(model: Any, optimizer: Any, before: Tensor) -> None:
    """With an evaluation before that, and without."""
    for evaluated in (False, True):
        step(model, optimizer)
        if evaluated:
            evaluate(model)
        with torch.no_grad():
            model.head.weight.mul_(0.9)
        backward(model, 6)
    step(model, optimizer)


def adds_up(model: Any, optimizer: Any, before: Tensor) -> None:
    backward(model, 6)
    step(model, optimizer)


def two_losses(model: Any, optimizer: Any, before: Tensor) -> None:
    model.zero_grad()
    with _engine(model).train_step(), autocast():
        losses = [model.loss(model.make_batch(seed, SAMPLES)) for seed in (3, 4)]
    for loss in losses:
        loss.backward()
    step(model, optimizer)


def steps_in_turn(model: Any, optimizer: Any, before: Tensor) -> None:
    """Two optimizers after one backward; a gradient without an optimizer remains."""
    model.zero_grad()
    halves = [list(model.parameters())[0:3], list(model.parameters())[3:-2]]
    optimizers = [torch.optim.AdamW(half, lr=0.01, eps=1e-4) for half in halves]
    for index in range(3):
        backward(model, index)
        for one in optimizers:
            with _engine(model).optimizers.stepping(one):
                one.step()
        model.zero_grad()


def puts_gradients_in(model: Any, optimizer: Any, before: Tensor) -> None:
    """Clip the user's own gradients, without a backward; then gradients of no parameter."""
    model.zero_grad()
    for clip in (0.1, None):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.25)
        if clip is None:
            _engine(model).optimizers.stepper(optimizer).clip_norm(0.1)
            model.zero_grad()
        else:
            step(model, optimizer, clip)
        evaluate(model)
        backward(model, 6)
        step(model, optimizer)


def replaces_gradients(model: Any, optimizer: Any, before: Tensor) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad.float() * 0.5
    step(model, optimizer)


def tries_again(model: Any, optimizer: Any, before: Tensor) -> None:
    with pytest.raises(ZeroDivisionError), _engine(model).optimizers.stepping(optimizer):
        raise ZeroDivisionError
    step(model, optimizer)


def puts_aside(model: Any, optimizer: Any, before: Tensor) -> None:
    saved = [param.grad for param in model.parameters()]
    model.zero_grad()
    backward(model, 6)
    step(model, optimizer)
    evaluate(model)
    for param, grad in zip(model.parameters(), saved, strict=True):
        param.grad = grad
    step(model, optimizer)


def steps_again(model: Any, optimizer: Any, before: Tensor) -> None:
    for _ in range(2):
        with _engine(model).optimizers.stepping(optimizer):
            optimizer.step()


def adds_up_again_and_again(model: Any, optimizer: Any, before: Tensor) -> None:
    for index in range(8):
        adds_up(model, optimizer, before)
        backward(model, index)


RIGHT: list[Then] = [
    evaluates,
    one_rank_evaluates,
    drops_gradients,
    edits_a_weight,
    replaces_gradients,
    tries_again,
    steps_in_turn,
]
# Sums of gradients are rounded twice, as are those that are clipped: from then on weights differ.
ROUNDED: list[Then] = [puts_gradients_in, adds_up, two_losses]


Found = Callable[[str], list[Trained]]


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> Found:
    """Return by transport and rank the weights after each case, where gradients have memory of their own."""
    return cache(
        lambda transport: ranks.run(2, up_to_backwards, False, TRANSPORTS[transport], of(transport), deadline=120)
    )


@pytest.fixture(scope="module")
def over(ranks: Ranks) -> Found:
    """Return the same where gradients alias copies, and the errors."""

    @cache
    def trained(transport: str) -> list[Trained]:
        refused = [puts_aside, steps_again, *([adds_up_again_and_again] if transport == "replayed" else [])]
        options, thens = TRANSPORTS[transport], of(transport)
        return ranks.run(2, up_to_backwards, True, options, thens, refused, deadline=120)

    return trained


def of(transport: str) -> list[Then]:
    """Replays reject code that needs weights again."""
    return [*RIGHT, *(ROUNDED[:1] if transport == "replayed" else ROUNDED)]


@pytest.mark.parametrize("transport", TRIED)
@pytest.mark.exhaustive_variants("replayed")
def test_what_comes_before_the_step_is_as_right_as_ever(over: Found, plain: Found, transport: str) -> None:
    # The transport changes no bit of a sum of two.
    expected = plain("replayed" if transport == "replayed" else "copies")
    for (mine, _), (its, _) in zip(over(transport), expected, strict=True):
        assert_close_relative(mine[: len(RIGHT)], its[: len(RIGHT)], 1e-6)
        assert_close_relative(mine, its, 3e-3)


@pytest.mark.parametrize("transport", TRIED)
def test_gradients_that_are_put_back_when_they_are_gone_are_refused(over: Found, transport: str) -> None:
    assert all("was detached and reattached" in refused[0] for _, refused in over(transport))


@pytest.mark.parametrize("transport", TRIED)
def test_a_second_step_whose_gradients_are_gone_is_refused(over: Found, transport: str) -> None:
    assert all("step() was called twice after one backward" in refused[1] for _, refused in over(transport))


def test_replays_that_would_read_gradients_as_weights_are_refused(over: Found) -> None:
    what = "is used again while its gradient is being reduced or waits for the optimizer step"
    assert all(what in refused[2] for _, refused in over("replayed"))


def norms_and_clipped() -> None:
    torch.manual_seed(17)
    model: Any = build(OneLayer)
    with engine_for(model, grad_aliasing=True, **BASE) as engine:
        optimizer = adamw(model)
        backward(model, 0)
        total = torch.stack(list(engine.optimizers.grad_norms(2.0).values())).norm()
        with engine.optimizers.stepping(optimizer, clip=0.1) as norm:
            assert norm is not None
            assert_close_relative(total, norm, 1e-5)
            grads = [param.grad for param in model.parameters()]
            optimizer.step()
        assert all(grad is not None for grad in grads)


def test_norms_are_as_exact_as_those_of_float32(ranks: Ranks) -> None:
    ranks.run(2, norms_and_clipped)
