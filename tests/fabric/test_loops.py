"""Compare loops that do other things around their steps with DDP."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.engine import engine_of
from lightning_zero.native.watchdog import Phase
from tests.helpers.fabric import adamw, closing, loss_of, make_fabric, network, set_up, whole_state
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import INPUTS, OUTPUTS, RTOL, WIDTH, make_loader, mlp, seeded
from tests.ranks.pool import Ranks

LoopTracker = Callable[[Any], tuple[Any, list[Tensor]]]  # takes a Fabric, returns models and observations
LOOPS: dict[str, LoopTracker] = {}


def loop(function: LoopTracker) -> LoopTracker:
    LOOPS[function.__name__] = function
    return function


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@loop
def two_forwards_before_one_backward(fabric: Any) -> Any:
    model, optimizer = set_up(fabric, network())
    seen = []
    for x, y in make_loader("ddp", 9):
        first, second = model(x), model(x * 0.5)
        loss = F.mse_loss(first, y) + F.mse_loss(second, first.detach())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [model], seen


@loop
def a_target_of_its_own_and_evaluation(fabric: Any) -> Any:
    """Run forwards without gradients within a step and between steps, in both modes of torch."""
    model, optimizer = set_up(fabric, network(), separately=True)
    seen = []
    for number, (x, y) in enumerate(make_loader("ddp", 9)):
        out = model(x)
        with torch.no_grad():
            target = model(x * 0.5)
        fabric.backward(F.mse_loss(out, y + 0.1 * target))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode() if number % 2 else torch.no_grad():
            seen.append(loss_of(model, (x, y)).clone())
        model.train()
    return [model], seen


@loop
def evaluation_comes_first(fabric: Any) -> Any:
    model = fabric.setup_module(network())
    [batch] = make_loader("ddp", 1)
    with torch.inference_mode():
        seen = [loss_of(model, batch)]
    optimizer = fabric.setup_optimizers(sgd(model))
    for batch in make_loader("ddp", 4):
        fabric.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return [model], seen


@loop
def two_models_in_turn(fabric: Any) -> Any:
    """As a GAN: each step of one is differentiated through the other, whose gradients are thrown away."""
    with seeded():
        generator, critic = mlp(), nn.Sequential(nn.Linear(OUTPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    (generator, first), (critic, second) = set_up(fabric, generator, make=sgd), set_up(fabric, critic, make=sgd)
    seen = []
    for x, y in make_loader("ddp", 9):
        with torch.no_grad():
            made = generator(x)
        loss = critic(made).square().mean() - critic(y).square().mean()
        fabric.backward(loss)
        second.step()
        second.zero_grad()
        other = -critic(generator(x)).square().mean()
        fabric.backward(other)
        first.step()
        first.zero_grad()
        second.zero_grad()
        seen += [loss.detach(), other.detach()]
    return [generator, critic], seen


@loop
def closures(fabric: Any) -> Any:
    model, optimizer = set_up(fabric, network())
    seen = []
    for batch in make_loader("ddp", 5):

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.3)
            return loss

        seen.append(optimizer.step(closure).detach())
    return [model], seen


@loop
def state_that_was_made_with_the_optimizer(fabric: Any) -> Any:
    """Adagrad's sums have whole parameters' shapes when the model is set up."""
    model = network()
    made = torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(made)
    for batch in make_loader("ddp", 5):
        fabric.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return [model], []


class Steps(nn.Module):
    """Its step is a method, and it was compiled by hand, as a whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.net = mlp()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self(x), y)
        self.seen.append(loss.item())
        return loss


@loop
def a_method_is_called_and_modules_were_compiled(fabric: Any) -> Any:
    steps = Steps()
    steps.net = torch.compile(steps.net, backend="eager")
    model, optimizer = set_up(fabric, torch.compile(steps, backend="eager"), make=adamw)
    for number, (x, y) in enumerate(make_loader("ddp", 6)):
        loss = model.training_step(x, y) if number % 3 else F.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert len(steps.seen) == 4
    return [model], [torch.tensor(steps.seen)]


def run(kind: str, name: str) -> dict[str, Any]:
    models, seen = LOOPS[name](make_fabric(kind))
    with closing(*models):
        engines = [engine for model in models if (engine := engine_of(model.module)) is not None]
        found = {
            "trained": {"state": [whole_state(model) for model in models], "seen": seen},
            "compiled": [list(engine.session.compiled_modules.modules) for engine in engines],
            "replays": sum(engine.executor.counters().get("replayed_graphs", 0) for engine in engines),
        }
    torch._dynamo.reset()
    return found


def run_both(kinds: list[str], name: str) -> list[dict[str, Any]]:
    return [run(kind, name) for kind in kinds]


SLOW = {"two_models_in_turn"}  # as the GANs of tests/trainer/test_manual_optimization.py
REPLAYED = {"two_forwards_before_one_backward", "a_target_of_its_own_and_evaluation", "two_models_in_turn"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LOOPS])
def test_a_loop_trains_what_it_trains_under_ddp(ranks: Ranks, name: str) -> None:
    kinds = ["ddp", "replayed" if name in REPLAYED else "compiled"]
    for ddp, *others in ranks.run(2, run_both, kinds, name):
        for kind, ours in zip(kinds[1:], others, strict=True):
            assert_close_relative(ours["trained"], ddp["trained"], 2 * RTOL, what=kind)
            assert all(ours["compiled"])
            assert (ours["replays"] > 0) == (kind == "replayed")
            if name.startswith("a_method"):
                assert ours["compiled"] == [[""]]  # and nothing of the method, which reads values


def copied() -> None:
    model, optimizer = set_up(make_fabric("eager"), network())
    with closing(model):
        [batch] = make_loader("ddp", 1)
        average = copy.deepcopy(model)
        assert engine_of(average) is None
        assert average[0].weight.shape == (WIDTH, INPUTS)
        with torch.no_grad():
            assert_close_relative(loss_of(average, batch), loss_of(model, batch), RTOL)


def test_a_copy_is_a_plain_model(ranks: Ranks) -> None:
    ranks.run(2, copied)


def end_early() -> tuple[dict[str, Phase], list[str], list[str]]:
    """Return the watchdog's phase after each part of a short loop, and the lines shown during it and at the end."""
    shown: list[str] = []
    with patch("lightning_zero.integrations.fabric.strategy.show_info", shown.append):
        fabric = make_fabric("compiled")
        model, optimizer = set_up(fabric, network())
    engine, phases, after = engine_of(model.module), [Phase.OUTSIDE], {}
    assert engine is not None
    with closing(model), patch.object(engine.watchdog, "enter", phases.append):
        for batch in make_loader("ddp", 3):
            fabric.backward(loss_of(model, batch))
            after["backward"] = phases[-1]
            optimizer.step()
            after["step"] = phases[-1]
            optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model.eval(), batch)
        after["evaluation"] = phases[-1]
        during = [*shown]
        model._forward_module.loop._finalizer()  # as at the end of the process
    return after, during, shown


def test_after_a_short_loop_the_watchdog_expects_no_step_and_the_start_is_shown(ranks: Ranks) -> None:
    [(after, during, shown)] = ranks.run(1, end_early)
    assert after == dict.fromkeys(("backward", "step", "evaluation"), Phase.USER_CODE)
    assert during == []
    assert [line.partition(":")[0] for line in shown] == ["Start", "Runs"]
    assert " s until batch 3 = " in shown[0]
