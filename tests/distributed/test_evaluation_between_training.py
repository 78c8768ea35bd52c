"""Evaluation between training steps computes the values of the plain model, and does not change training."""

from typing import Any

import pytest
import torch

from tests.helpers.models import CalledTwice, Case, LSTMNet, build, make_batches
from tests.helpers.oracle import assert_close_relative, shard_batch
from tests.helpers.sharded import BACKENDS, EAGER, adamw, engine_for, train_plain, train_sharded
from tests.ranks.pool import Ranks

CASE, STEPS, SAMPLES = CalledTwice, 3, 12
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def train_evaluate_train(case: type[Case], backend: str) -> tuple[Any, dict[str, float], Any, bool]:
    model = build(case)
    batches = make_batches(case, 2 * STEPS, SAMPLES)
    with engine_for(model, backend) as engine:
        optimizer = adamw(model)
        first = train_sharded(engine, model, batches[:STEPS], optimizer)
        losses = {}
        model.eval()
        for name, mode in MODES.items():
            for samples in (2, 5):  # other shapes than in training
                (batch,) = make_batches(case, 1, samples)
                engine.eval_step()
                with mode():
                    losses[f"{name} {samples}"] = model.loss(batch).item()
        model.train()
        second = train_sharded(engine, model, batches[STEPS:], optimizer)
        normal = not any(param.is_inference() for param in model.parameters())
        return first, losses, second, normal


@pytest.mark.parametrize(
    ("case", "world_size", "backend"),
    # Dynamo runs the recurrent one eagerly, and would compile the functions that it calls.
    [(CASE, 1, EAGER), (CASE, 2, "aot_eager"), (CASE, 3, EAGER), (LSTMNet, 2, "aot_eager")],
    ids=["1-eager", "2-compiled", "3-eager", "recurrent"],
)
def test_training_goes_on_as_if_nothing_had_been_evaluated(
    ranks: Ranks, case: type[Case], world_size: int, backend: str
) -> None:
    plain = build(case)
    batches = make_batches(case, 2 * STEPS, SAMPLES)
    optimizer = adamw(plain)
    expected = [train_plain(plain, batches[:STEPS], optimizer, world=world_size)]
    with torch.no_grad():
        evaluated = {n: plain.loss(make_batches(case, 1, n)[0]).item() for n in (2, 5)}
    expected.append(train_plain(plain, batches[STEPS:], optimizer, world=world_size))
    for first, losses, second, normal in ranks.run(world_size, train_evaluate_train, case, backend, deadline=120):
        for got, want in zip((first, second), expected, strict=True):
            assert_close_relative(got.losses, want.losses, 1e-5, what="losses")
            assert_close_relative(got.params, want.params, 1e-5, atol=1e-6, what="parameters")
        for name, loss in losses.items():
            assert_close_relative(loss, evaluated[int(name.split()[1])], 1e-5, what=name)
        assert normal, "shards must not become inference tensors"


def evaluate_first(backend: str) -> tuple[float, Any]:
    model = build(CASE)
    batches = make_batches(CASE, STEPS, SAMPLES)
    with engine_for(model, backend) as engine:
        engine.eval_step()
        with torch.inference_mode():
            loss = model.loss(shard_batch(batches[0], 0, 1)).item()
        return loss, train_sharded(engine, model, batches, adamw(model))


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_may_come_before_training(ranks: Ranks, backend: str) -> None:
    plain = build(CASE)
    batches = make_batches(CASE, STEPS, SAMPLES)
    with torch.no_grad():
        before = plain.loss(batches[0]).item()
    expected = train_plain(plain, batches, adamw(plain), world=2)
    for loss, got in ranks.run(2, evaluate_first, backend, deadline=120):
        assert_close_relative(loss, before, 1e-5, what="evaluated loss")
        assert_close_relative(got.losses, expected.losses, 1e-5, what="losses")
