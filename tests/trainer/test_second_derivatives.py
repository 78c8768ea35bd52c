"""Fall back to eager code for double backward and transforms of torch.func. Compared with DDP."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import INPUTS, OUTPUTS, Regression, fitted, global_losses, seeded, whole_state
from tests.ranks.pool import Ranks

WIDTH, STEPS = 64, 3


class Penalised(Regression):
    """A gradient penalty on a net whose input another module makes; that one is differentiated once."""

    begins = 0

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.encoder = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh())
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.encoder(batch[0])
        out = self.net(x)
        loss = F.mse_loss(out, batch[1])
        if self.global_step >= self.begins:
            (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            loss = loss + 0.1 * grad.square().sum(1).mean()
        self.losses.append(loss.item())
        return loss


class Late(Penalised):
    begins = 2


class ForcesInside(Regression):
    """A module that differentiates an inner one itself, as force fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _Forces()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        energy, forces = self.net(batch[0])
        loss = F.mse_loss(energy, batch[1]) + forces.square().mean()
        self.losses.append(loss.item())
        return loss


class _Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.energy = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class Functional(Regression):
    """Per-sample gradients, a directional derivative, other weights, and a plain call of another net."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))
            self.plain = nn.Linear(INPUTS, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        grads = torch.func.vmap(torch.func.grad(lambda sample: self.net(sample).square().sum()))(x)
        out, tangent = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
        loss = grads.square().mean() + F.mse_loss(out, batch[1]) + tangent.square().mean()
        loss = loss + self.plain(x).square().mean()
        self.losses.append(loss.item())
        return loss


class OtherWeights(Regression):
    """One step of MAML: the net is called with weights that it does not hold."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.net = nn.Linear(INPUTS, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        weights = {"weight": self.net.weight, "bias": self.net.bias}

        def inner(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.net, weights, (x,)).square().mean()

        grads = torch.func.grad(inner)(weights)
        loss = inner({name: weight - 0.1 * grads[name] for name, weight in weights.items()})
        self.losses.append(loss.item())
        return loss


class _Turns(nn.Module):
    """Later its weights are first read inside a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.transforms = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.transforms:
            return self.second(self.first(x).tanh())
        return torch.func.vmap(lambda row: self.second(self.first(row).tanh()))(x)


class BeginsLate(Regression):
    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.net = _Turns()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net.transforms = batch_idx > 1
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss


class KeepsGraph(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def backward(self, loss: Tensor) -> None:
        self.losses.append(loss.item())
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()


def _train(kind: str, make: Any) -> dict[str, Any]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lightning_zero.integrations.strategy_base.show_info", said.append)
        with fitted(kind, make, STEPS) as (module, trainer):
            values = {"losses": global_losses(kind, module), "state": whole_state(module)}
            compiled_modules = (
                None if kind in ("ddp", "single") else trainer.strategy._require_engine().session.compiled_modules
            )
            compiled = sorted(compiled_modules.modules) if compiled_modules else []
    return {"values": values, "compiled": compiled, "said": [line for line in said if line.startswith("Not compiling")]}


def _train_all(make: Any, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    return [_train(kind, make) for kind in kinds]


@pytest.mark.parametrize(
    ("make", "compiled", "said"),
    [
        (Penalised, ["encoder"], ["'net' (Sequential): it is differentiated twice (create_graph=True)"]),
        (ForcesInside, [], ["'net' (_Forces): it is differentiated twice (create_graph=True)"]),
        (Functional, ["plain"], ["'net' (Sequential): it is called inside torch.func (grad, vmap, ...)"]),
        (BeginsLate, ["net"], []),
        (OtherWeights, [], ["'net' (Linear): it is called inside torch.func (grad, vmap, ...)"]),
    ],
)
def test_they_train_as_under_ddp_and_the_rest_is_compiled(
    ranks: Ranks, make: Any, compiled: list[str], said: list[str]
) -> None:
    for ddp, eager, ours in ranks.run(2, _train_all, make, ("ddp", "eager", "compiled")):
        assert ours["compiled"] == compiled
        assert [line.split(", which")[0] for line in ours["said"]] == [f"Not compiling {line}" for line in said]
        for found in (eager, ours):
            assert_close_relative(found["values"], ddp["values"], 1e-6, atol=1e-8)


def test_a_graph_that_is_kept_in_each_step(ranks: Ranks) -> None:
    """Compare with one process: DDP reduces the gradients of the first of two backward passes only."""
    for single, eager, ours in ranks.run(2, _train_all, KeepsGraph, ("single", "eager", "compiled")):
        assert ours["compiled"] == [""]
        for found in (eager, ours):
            assert_close_relative(found["values"], single["values"], 1e-6, atol=1e-7)


def _begin_late() -> str:
    with pytest.raises(MisconfigurationException) as error:
        _train("compiled", Late)
    return str(error.value)


def test_what_begins_after_compilation_is_an_error_that_says_what_to_do(ranks: Ranks) -> None:
    for message in ranks.run(2, _begin_late):
        assert "differentiated twice (create_graph=True)" in message
        assert "'net' (Sequential)" in message
        assert "torch.compiler.disable" in message
        assert "compile=False" in message


class OfShards(OtherWeights):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        shards = dict(self.net.named_parameters())
        grads = torch.func.grad(lambda w: torch.func.functional_call(self.net, w, (batch[0],)).square().mean())(shards)
        return sum(grad.sum() for grad in grads.values())  # type: ignore[return-value]


class Hyper(Regression):
    """Another module makes a net's weights."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.maker = nn.Linear(INPUTS, WIDTH * WIDTH)
            self.net = nn.Linear(WIDTH, WIDTH, bias=False)
            self.wide = nn.Linear(INPUTS, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.maker(batch[0]).mean(0).view(WIDTH, WIDTH)
        out = torch.func.functional_call(self.net, {"weight": weight}, (self.wide(batch[0]),))
        loss = out.square().mean()
        self.losses.append(loss.item())
        return loss


def test_a_net_that_is_given_its_weights(ranks: Ranks) -> None:
    for ddp, eager, ours in ranks.run(2, _train_all, Hyper, ("ddp", "eager", "compiled")):
        assert ours["compiled"] == ["maker", "wide"]
        assert "torch.func.functional_call" in ours["said"][0]
        for found in (eager, ours):
            assert_close_relative(found["values"], ddp["values"], 1e-6, atol=1e-8)


def _differentiate_shards(kind: str) -> str:
    with pytest.raises(MisconfigurationException) as error:
        _train(kind, OfShards)
    return str(error.value)


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_gradients_of_shards_are_refused_by_transforms(ranks: Ranks, kind: str) -> None:
    for message in ranks.run(2, _differentiate_shards, kind):
        assert "module.weight" in message
