"""Test our update rules against the optimizers that they copy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.optim.update_rules import Rule, rule_for
from tests.helpers.lion import Lion

STEPS = 20
Make = Callable[[list[Tensor]], torch.optim.Optimizer]

optim = torch.optim
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "AdamW without decay": lambda p: optim.AdamW(p, lr=0.02, weight_decay=0.0, betas=(0.8, 0.95)),
    "Adam": lambda p: optim.Adam(p, lr=0.02),
    "Adam with decay and maximum": lambda p: optim.Adam(p, lr=0.02, weight_decay=0.1, amsgrad=True),
    "Adam with decoupled decay": lambda p: optim.Adam(p, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "Adam uphill": lambda p: optim.Adam(p, lr=0.02, maximize=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.3),
    "SGD by Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.02),
    "NAdam with decay": lambda p: optim.NAdam(p, lr=0.02, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
    "NAdam with decoupled decay": lambda p: optim.NAdam(p, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "NAdam with another schedule, uphill": lambda p: optim.NAdam(p, lr=0.02, momentum_decay=0.5, maximize=True),
    "RAdam": lambda p: optim.RAdam(p, lr=0.02),
    "RAdam with decay": lambda p: optim.RAdam(p, lr=0.02, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
    "RAdam with decoupled decay": lambda p: optim.RAdam(p, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam that is never rectified, uphill": lambda p: optim.RAdam(p, lr=0.02, betas=(0.9, 0.6), maximize=True),
    "Adamax": lambda p: optim.Adamax(p, lr=0.02),
    "Adamax with decay": lambda p: optim.Adamax(p, lr=0.02, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
    "Adamax uphill": lambda p: optim.Adamax(p, lr=0.02, maximize=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.02),
    "RMSprop with momentum": lambda p: optim.RMSprop(p, lr=0.02, momentum=0.7, weight_decay=0.1, alpha=0.9),
    "RMSprop, centered": lambda p: optim.RMSprop(p, lr=0.02, centered=True, eps=1e-3),
    "RMSprop with all": lambda p: optim.RMSprop(p, lr=0.02, centered=True, momentum=0.7, eps=1e-3, maximize=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adagrad with decays": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.2, weight_decay=0.1, eps=1e-3),
    "Adagrad from a start, uphill": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3, maximize=True),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "Adadelta with decay": lambda p: optim.Adadelta(p, lr=0.5, rho=0.7, eps=1e-3, weight_decay=0.1),
    "Adadelta uphill": lambda p: optim.Adadelta(p, maximize=True),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
    "ASGD that averages": lambda p: optim.ASGD(p, lr=0.1, lambd=0.2, alpha=0.6, t0=5, weight_decay=0.1),
    "ASGD uphill": lambda p: optim.ASGD(p, lr=0.1, t0=0, maximize=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.02),
    "Rprop within bounds": lambda p: optim.Rprop(p, lr=0.02, etas=(0.3, 1.9), step_sizes=(0.01, 0.1)),
    "Rprop uphill": lambda p: optim.Rprop(p, lr=0.02, maximize=True),
    "a user's own": lambda p: Lion(p, lr=0.02),
}


def setting(group: dict[str, Any], key: str) -> Tensor:
    value = group[key[:-2]][int(key[-1])] if key.endswith((".0", ".1")) else group[key]
    return torch.tensor(value, dtype=torch.float64)


def gradients(size: int) -> list[Tensor]:
    """Return gradients of all sizes, with zeros; signs stay for some steps."""
    torch.manual_seed(3)
    sizes = [10 ** torch.randint(-4, 2, (size,)).float() * (torch.rand(size) > 0.05) for _ in range(STEPS)]
    signs = [torch.randn(size) + 1.5 * torch.sin(torch.arange(size) + step / 3) for step in range(STEPS)]
    return [a * b for a, b in zip(sizes, signs, strict=True)]


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rules_follow_their_optimizers(name: str, precision: torch.dtype) -> None:
    start, grads = torch.randn(257, generator=torch.Generator().manual_seed(1)), gradients(257)
    theirs = torch.nn.Parameter(start.to(precision))
    optimizer = OPTIMIZERS[name]([theirs])
    group, state = optimizer.param_groups[0], optimizer.state[theirs]
    rule = rule_for(optimizer, group)
    assert rule is not None

    # The optimizer makes the first step and the state, as with the stepper.
    theirs.grad = grads[0].to(precision)
    optimizer.step()
    assert_described(rule, state, theirs)
    ours, own = theirs.detach().float().clone(), {key: state[key].float().clone() for key in rule.state}
    counts = {key: state[key].double() for key in rule.counts}
    for step, grad in enumerate(grads[1:], 2):
        group["lr"] *= 0.9
        theirs.grad = grad.to(precision)
        optimizer.step()
        scalars = rule.scalars(
            {key: setting(group, key) for key in rule.settings} | counts, torch.tensor(step, dtype=torch.float32)
        )
        counts = {key: scalars.pop(key) for key in rule.counts}
        ours, own = rule.apply(ours, grad, own, {k: v.float() for k, v in scalars.items()})
        assert {ours.dtype, *(v.dtype for v in own.values())} == {torch.float32}
    assert set(own) == set(rule.state)
    for key, value in {**own, **counts}.items():
        assert_same(value, state[key])
    assert_same(ours, theirs.detach())


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Compare up to a few roundings of the element or of its summands."""
    atol = 2e-7 * float(theirs.abs().max())
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-6, atol=atol)


def assert_described(rule: Rule, state: dict[str, Any], param: Tensor) -> None:
    """Check that the rule names all state: unnamed state would not change in a captured step."""
    shapes = dict.fromkeys(rule.state, param.shape) | dict.fromkeys(rule.counts, ())
    assert {key: value.shape for key, value in state.items() if key != "step"} == shapes


FLAGS = ("capturable", "foreach", "fused")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_how_the_optimizer_itself_would_step_makes_no_difference(name: str) -> None:
    optimizer = OPTIMIZERS[name]([torch.zeros(3, requires_grad=True)])
    (group,) = optimizer.param_groups
    rule = rule_for(optimizer, group)
    flags = [flag for flag in FLAGS if flag in group]
    assert flags or name == "a user's own"
    for flag in flags:
        assert rule_for(optimizer, {**group, flag: True}) is rule
    assert rule_for(optimizer, {**group, "differentiable": True}) is None


class Mine(torch.optim.AdamW):
    pass


class MyRprop(torch.optim.Rprop):
    pass


@pytest.mark.parametrize("make", [Mine, MyRprop, torch.optim.SparseAdam], ids=lambda make: make.__name__)
def test_a_subclass_has_no_rule(make: Any) -> None:
    optimizer = make([torch.zeros(3, requires_grad=True)])
    assert rule_for(optimizer, optimizer.param_groups[0]) is None
