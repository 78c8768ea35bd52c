"""Our update rules against the optimizers whose rules they are."""

from collections.abc import Callable

import pytest
import torch

from lightning_zero.optim.formulas import rule_for

STEPS = 12
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "AdamW without decay": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.0, betas=(0.8, 0.95)),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "Adam with decay and maximum": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1, amsgrad=True),
    "Adam uphill": lambda p: torch.optim.Adam(p, lr=0.02, maximize=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.3),
    "SGD by Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rules_follow_their_optimizers(name: str) -> None:
    torch.manual_seed(3)
    start = torch.randn(257, dtype=torch.float32)
    grads = [torch.randn(257) * 10 ** torch.randint(-4, 2, (257,)).float() for _ in range(STEPS)]
    theirs = torch.nn.Parameter(start.double())
    optimizer = OPTIMIZERS[name]([theirs])
    group = optimizer.param_groups[0]
    rule = rule_for(optimizer, group)
    assert rule is not None

    ours, state = start.clone(), {key: torch.zeros_like(start) for key in rule.state}
    for step, grad in enumerate(grads, 1):
        group["lr"] *= 0.9
        theirs.grad = grad.double()
        optimizer.step()
        setting = {
            key: torch.tensor(group["betas"][int(key[-1])] if "." in key else group[key], dtype=torch.float64)
            for key in rule.settings
        }
        scalars = rule.scalars(setting, torch.tensor(float(step)))
        if step == 1 and "momentum_buffer" in rule.state:
            # The optimizer's first buffer is the gradient itself; this is the one before it.
            wide = grad + group["weight_decay"] * ours
            state["momentum_buffer"] = wide * (1 - scalars["rise"].float()) / group["momentum"]
        ours, state = rule.apply(ours, grad, state, {k: v.float() for k, v in scalars.items()})
    for key in rule.state:
        torch.testing.assert_close(state[key].double(), optimizer.state[theirs][key], rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(ours.double(), theirs.detach(), rtol=2e-6, atol=2e-6)


def test_a_subclass_has_no_rule() -> None:
    class Mine(torch.optim.AdamW):
        pass

    params = [torch.zeros(3, requires_grad=True)]
    for optimizer in (Mine(params), torch.optim.RMSprop(params), torch.optim.AdamW(params, differentiable=True)):
        assert rule_for(optimizer, optimizer.param_groups[0]) is None
