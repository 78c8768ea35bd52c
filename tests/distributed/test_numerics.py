"""Twelve steps of a small model on shards equal twelve steps of the plain model in one process."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.integrations.precision import FlatGradScaler
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from tests.helpers.models import Case, NextToken, build, make_batches
from tests.helpers.oracle import Batch, Reference, assert_close_relative, batches_for_rank, shard_batch, train_reference
from tests.helpers.sharded import (
    EAGER,
    adamw,
    engine_for,
    sgd,
    single_thread,
    train_sharded,
    whole_grads,
    whole_params,
)
from tests.ranks.pool import Ranks

STEPS, SAMPLES, CLIP = 12, 12, 0.25
FOLLOWED = 6  # steps, each of which starts anew

# Arguments of the engine, and whether autocast is on.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "autocast": {},
    "bf16-mixed": {"reduce_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16},  # as Lightning's strategy has it
    "bf16-true": {},
}


def context_of(precision: str) -> Callable[[], Any]:
    return partial(torch.autocast, "cpu", torch.bfloat16) if precision in ("autocast", "bf16-mixed") else nullcontext


class Counting(NextToken):
    """Embedded, normed, through a layer and back; attention would take most of the time of compiling it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(61, 24)
        self.norm = nn.LayerNorm(24)
        self.mlp = nn.Sequential(nn.Linear(24, 41), nn.GELU(), nn.Linear(41, 24))
        self.head = nn.Linear(24, 61, bias=False)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        # Counting, from anywhere: something to learn from any batch for any other.
        start = torch.randint(61, (n, 1), generator=torch.Generator().manual_seed(seed))
        ids = (start + torch.arange(9)) % 61
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(x + self.mlp(self.norm(x)))


def model_of(precision: str, kind: type[Case] | None = None) -> Case:
    model = build(kind or Counting)
    return model.bfloat16() if precision == "bf16-true" else model


def loss_in(context: Callable[[], Any], model: Any, batch: Batch) -> Tensor:
    with context():
        return model.loss(batch)


@cache
def reference(
    precision: str, world: int, clip: float | None, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
) -> Reference:
    with single_thread():
        return train_reference(
            model_of(precision),
            make_batches(Counting, STEPS, SAMPLES),
            make_optimizer,
            partial(loss_in, context_of(precision)),
            world=world,
            clip_norm=clip,
        )


def train(
    precision: str,
    backend: str,
    clip: float | None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> Reference:
    model = model_of(precision)
    batches = make_batches(Counting, STEPS, SAMPLES)
    with engine_for(model, backend, **PRECISIONS[precision]) as engine:
        out = train_sharded(
            engine, model, batches, make_optimizer(model), clip_norm=clip, context=context_of(precision)
        )
        # Everything but the first step ran as it was meant to.
        assert len(engine.session.compiled_modules.modules) == (backend != EAGER)
        return out


@pytest.mark.parametrize(
    ("world_size", "precision", "backend"),
    [
        (1, "fp32", EAGER),
        *((2, precision, EAGER) for precision in ("fp32", "autocast", "bf16-true")),
        *((2, precision, "aot_eager") for precision in ("fp32", "autocast")),
        pytest.param(2, "bf16-true", "aot_eager", marks=pytest.mark.slow),
    ],
)
@pytest.mark.exhaustive_variants("2-bf16-true-aot_eager")
def test_unclipped_training_is_bitwise_that_of_one_process(
    ranks: Ranks, world_size: int, precision: str, backend: str
) -> None:
    # Halving is exact, and two summands have one order: with at most two ranks nothing is left to round otherwise.
    out = ranks.run(world_size, train, precision, backend, None)[0]
    expected = reference(precision, world_size, None)
    for what in ("losses", "grads", "params"):
        assert_close_relative(getattr(out, what), getattr(expected, what), 0.0, what=what)
    assert_close_relative(out.grad_norms, expected.grad_norms, 1e-2 if precision == "bf16-true" else 1e-6, what="norm")


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [*((world_size, EAGER) for world_size in (1, 2, 3)), (3, "aot_eager")],
)
@pytest.mark.exhaustive_variants("3-eager")
def test_clipped_training_equals_one_process(ranks: Ranks, world_size: int, backend: str) -> None:
    out = ranks.run(world_size, train, "fp32", backend, CLIP, sgd)[0]
    expected = reference("fp32", world_size, CLIP, sgd)
    assert min(expected.grad_norms) > CLIP
    for what in ("losses", "grads", "grad_norms", "params"):
        assert_close_relative(getattr(out, what), getattr(expected, what), 1e-6, what=what)


def follow(precision: str, backend: str) -> None:
    """Start each step from the shards' own values: low precision would carry two free runs apart."""
    model, plain = model_of(precision), model_of(precision)
    context = context_of(precision)
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    with engine_for(model, backend, **PRECISIONS[precision]) as engine:
        for step, batch in enumerate(make_batches(Counting, FOLLOWED, SAMPLES)):
            plain.load_state_dict(whole_params(engine, model))
            shares = []
            for share in range(engine.world_size):
                plain.zero_grad()
                loss_in(context, plain, shard_batch(batch, share, engine.world_size)).backward()
                shares.append({name: param.grad.double() for name, param in plain.named_parameters()})
            out = train_sharded(engine, model, [batch], Unstepped(model.parameters()), context=context, clip_norm=CLIP)
            expected = {name: torch.stack([share[name] for share in shares]).mean(0) for name in shares[0]}
            for name, grad in expected.items():
                # Rounding on the wire is relative to each rank's values, which may cancel.
                rounded = (
                    0.0 if precision == "autocast" else 6e-3 * sum(share[name].norm() for share in shares) / len(shares)
                )
                assert_close_relative(out.grads[0][name], grad, 1e-6, rounded, what=f"gradient of {name}, step {step}")
            norm = nn.utils.get_total_norm(expected.values()).item()
            assert_close_relative(out.grad_norms[0], norm, 1e-6 if precision == "autocast" else 1e-2, what="norm")
            assert norm > CLIP
            # The optimizer's result of the same clipped gradient is equal to the bit.
            clipped = whole_grads(engine, model)
            for name, param in plain.named_parameters():
                param.grad = clipped[name]
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            plain_optimizer.step()
            optimizer.zero_grad()
            assert_close_relative(whole_params(engine, model), dict(plain.named_parameters()), 0.0, what=f"step {step}")


class Unstepped(torch.optim.SGD):
    """An optimizer whose gradients are still wanted."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "backend"),
    [
        *((p, "aot_eager") for p in ("autocast", "bf16-mixed")),
        pytest.param("bf16-true", "aot_eager", marks=pytest.mark.exhaustive),
        ("bf16-mixed", EAGER),
    ],
)
@pytest.mark.parametrize("world_size", [3], ids="W={}".format)
@pytest.mark.exhaustive_variants("W=3-autocast-aot_eager")
def test_each_low_precision_step_equals_that_of_one_process(
    ranks: Ranks, world_size: int, precision: str, backend: str
) -> None:
    ranks.run(world_size, follow, precision, backend)


@pytest.mark.exhaustive  # the test above compares each step
def test_low_precision_loss_curve_lies_on_that_of_one_process(ranks: Ranks) -> None:
    """The case with a copy of the weights that could be wrong; without one, each step shows it (above)."""
    out = ranks.run(3, train, "bf16-mixed", "aot_eager", CLIP)[0]
    expected = reference("bf16-mixed", 3, CLIP)
    assert_close_relative(out.losses, expected.losses, 1e-2, what="loss")
    assert expected.losses[-1] < 0.8 * expected.losses[0]


class Net(Case):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(19, 25), nn.Tanh(), nn.Linear(25, 23))

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 19, generator=rng), torch.randn(n, 23, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


OVERFLOWS, INJECTED = 4, 9  # steps


def scaled_batches() -> list[Batch]:
    batches = make_batches(Net, 14, SAMPLES)
    batches[OVERFLOWS][1][-1] = 1e30  # a sample of the last rank's
    return batches


def scaled_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, clip: Callable[[], Tensor], index: int
) -> tuple[float, float]:
    scaler.unscale_(optimizer)
    norm = clip().item()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm, scaler.get_scale()


def train_with_scaler(backend: str) -> dict[str, Any]:
    model = build(Net)
    optimizer = sgd(model)
    out: dict[str, Any] = {"steps": [], "params": []}
    with engine_for(model, backend, compute_dtype=torch.float16) as engine:
        scaler = FlatGradScaler(lambda optimizer: engine, "cpu", init_scale=2.0**10, growth_interval=3)
        stepper = engine.optimizers.stepper(optimizer)
        for index, batch in enumerate(batches_for_rank(scaled_batches(), engine.rank, engine.world_size)):
            with engine.train_step():
                loss = loss_in(partial(torch.autocast, "cpu", torch.float16), model, batch)
            scaler.scale(loss).backward()
            if index == INJECTED and engine.rank == engine.world_size - 1:
                # In a shard that no other rank sees.
                with no_shard_dispatch():
                    next(model.parameters()).grad[0, 0] = torch.inf
            engine.cycle.before_step()
            out["steps"].append(
                scaled_step(model, optimizer, scaler, partial(stepper.clip_norm, CLIP, later=True), index)
            )
            out["params"].append(whole_params(engine, model))
    return out


def train_with_scaler_in_one_process(world: int) -> dict[str, Any]:
    model = build(Net)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    out: dict[str, Any] = {"steps": [], "params": []}
    for index, batch in enumerate(scaled_batches()):
        for rank in range(world):
            loss = loss_in(partial(torch.autocast, "cpu", torch.float16), model, shard_batch(batch, rank, world))
            scaler.scale(loss / world).backward()
        if index == INJECTED:
            next(model.parameters()).grad[0, 0] = torch.inf
        clip = partial(nn.utils.clip_grad_norm_, model.parameters(), CLIP)
        out["steps"].append(scaled_step(model, optimizer, scaler, clip, index))
        out["params"].append({name: param.detach().clone() for name, param in model.named_parameters()})
    return out


@pytest.mark.parametrize(
    ("world_size", "backend"), [*((world_size, EAGER) for world_size in (1, 2, 3)), (3, "aot_eager")]
)
@pytest.mark.exhaustive_variants("3-eager")
def test_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks, world_size: int, backend: str) -> None:
    expected = train_with_scaler_in_one_process(world_size)
    for rank, out in enumerate(ranks.run(world_size, train_with_scaler, backend)):
        for index, (after, wanted) in enumerate(zip(out["params"], expected["params"], strict=True)):
            assert_close_relative(after, wanted, 1e-3, what=f"rank {rank}, step {index}")
        for skipped in (OVERFLOWS, INJECTED):
            assert_close_relative(out["params"][skipped], out["params"][skipped - 1], 0.0, what=f"skipped {skipped}")
        norms, scales = zip(*out["steps"], strict=True)
        assert scales == tuple(scale for _, scale in expected["steps"])
        finite = [i for i, norm in enumerate(norms) if torch.tensor(norm).isfinite()]
        assert finite == [i for i in range(len(norms)) if i not in (OVERFLOWS, INJECTED)]
        assert_close_relative([norms[i] for i in finite], [expected["steps"][i][0] for i in finite], 1e-3)


def train_generated(kind: type[Case], precision: str) -> Reference:
    model = model_of(precision, kind)
    with engine_for(model, "inductor", **PRECISIONS[precision]) as engine:
        return train_sharded(
            engine, model, make_batches(kind, STEPS, SAMPLES), sgd(model), clip_norm=CLIP, context=context_of(precision)
        )


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.exhaustive), "bf16-mixed"])
def test_generated_code_equals_one_process(ranks: Ranks, precision: str) -> None:
    out = ranks.run(2, train_generated, Net, precision, deadline=300)[0]
    expected = train_reference(
        model_of(precision, Net),
        make_batches(Net, STEPS, SAMPLES),
        sgd,
        partial(loss_in, context_of(precision)),
        world=2,
        clip_norm=CLIP,
    )
    rtol = 1e-6 if precision == "fp32" else 1e-2
    for what in ("losses", "grads", "grad_norms", "params"):
        assert_close_relative(getattr(out, what), getattr(expected, what), rtol, what=what)
