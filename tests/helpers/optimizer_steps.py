"""Optimizers' steps on shards and those of the plain optimizer, with an event between them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.step.runners import CapturedRunner
from tests.helpers import lion
from tests.helpers.models import build
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import engine_for, whole_params, whole_state
from tests.helpers.spread import check_spread
from tests.ranks.pool import Ranks

STEPS = 14
CLIP = 0.3


class Parts(nn.Module):
    """Matrices and vectors by turns; which parts take part in a step is up to the caller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.second = nn.Linear(19, 25), nn.LayerNorm(25), nn.Linear(25, 23)
        self.extra, self.later = nn.Linear(19, 23), nn.Linear(19, 23, bias=False)

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        out = self.second(self.norm(torch.tanh(self.first(x)))) + self.later(x)
        return out + self.extra(x) if extra else out


class Lion(torch.optim.Optimizer):
    """As third parties write them: a Python loop, floats, an integer count of steps, and one in the group."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"], state["count"] = torch.zeros_like(param), 0
                state["count"] += 1
                state["average"].lerp_(param.grad, 1 - group["beta"])
                param.add_(torch.tanh(1e3 * state["average"]), alpha=-group["lr"] / math.sqrt(state["count"]))


def two_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    live = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in live if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in live if param.dim() < 2], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(two_groups(m), lr=0.02, eps=1e-4),
    "Adam": lambda m: torch.optim.Adam(two_groups(m), lr=0.02, eps=1e-4, amsgrad=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, eps=1e-4, momentum=0.5, centered=True),
    "Lion": lambda m: Lion([param for param in m.parameters() if param.requires_grad]),
    "NAdam": lambda m: torch.optim.NAdam(two_groups(m), lr=0.02, eps=1e-4, decoupled_weight_decay=True),
    "RAdam": lambda m: torch.optim.RAdam(two_groups(m), lr=0.02, eps=1e-4),
    "Adamax": lambda m: torch.optim.Adamax(two_groups(m), lr=0.02, eps=1e-4),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": lambda m: torch.optim.Adadelta(two_groups(m), eps=1e-4),
    "ASGD": lambda m: torch.optim.ASGD(two_groups(m), lr=0.1, lambd=0.1, t0=4),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "a user's own": lambda m: lion.Lion(two_groups(m), lr=0.01),
}


UNPADDED = ("Adamax", "Adagrad", "Rprop")  # whose state is not zero where gradients are


SELDOM = ("NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "Rprop", "a user's own")


Event = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def unfreeze_and_add(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Act as BackboneFinetuning does."""
    if step == 0:
        model.later.requires_grad_(False)
    if step == 6:
        model.later.requires_grad_(True)
        optimizer.add_param_group({"params": [model._parameters_of_later()], "lr": 0.05})


def other_settings(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Cycled momentum, weight decay that starts in the middle, and another clipping threshold."""
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (0.8 + 0.01 * step, 0.99)
        if "momentum" in group:
            group["momentum"] = 0.8 + 0.01 * step
        if step == 7:
            group["weight_decay"] = 0.05


def load_own_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 5:
        optimizer.load_state_dict(optimizer.state_dict())


def forget_one_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 5:
        del optimizer.state[optimizer.param_groups[0]["params"][1]]
    if step == 9:
        optimizer.state.clear()


def replace_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def train(model: Any, optimizer: torch.optim.Optimizer, event: Event, engine: Engine | None) -> list[Any]:
    """Warm-up and cosine; gradients cross the clipping threshold both ways.

    Parts of the model rest by turns.
    """
    record = []
    for step in range(STEPS):
        scale = 0.02 if step % 3 == 0 else 1.0
        rate = min(1.0, (step + 1) / 4) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        event(model, optimizer, step)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= rate
        x = torch.randn(6, 19, generator=torch.Generator().manual_seed(step))
        extra = event is nothing or step % 4 != 2
        if engine is None:
            (scale * model(x, extra).square().mean()).backward()
            if event is replace_gradients:
                model.first.weight.grad = 2 * model.first.weight.grad
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            params = {name: param.detach().clone() for name, param in model.named_parameters()}
        else:
            x = x.to(engine.device)
            share = x.shape[0] // engine.world_size
            with engine.train_step():
                loss = scale * model(x[engine.rank * share :][:share], extra).square().mean()
            loss.backward()
            if event is replace_gradients:
                shard = model._modules["first"]._parameters["weight"]
                shard.grad = 2 * shard.grad
            norm = engine.optimizers.stepper(optimizer).clip_norm(CLIP, later=step % 2 == 1)
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            params = whole_params(engine, model)
        record.append((float(norm), params))
        optimizer.zero_grad()
        for group, before in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = before
    return record


def train_sharded_steps(
    name: str, event: Event, emulate: bool, device: str = "cpu", capture: bool | str = "auto", **options: Any
) -> tuple[list[Any], dict[str, Tensor], Any]:
    model = build(Parts)
    model.__dict__["_parameters_of_later"] = lambda: model._modules["later"]._parameters["weight"]
    model.later.requires_grad_(event is not unfreeze_and_add)
    options |= {"emulate_cuda_graph_step": emulate, "cuda_graph_step": capture}
    with engine_for(model, "eager", device=device, **options) as engine:
        with engine.registered_parameters():
            optimizer = OPTIMIZERS[name](model)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        check_spread(engine, model)
        record = train(model, optimizer, event, engine)
        stepper = engine.optimizers.stepper(optimizer)
        captured = isinstance(stepper.runner, CapturedRunner)
        state = whole_state(engine, optimizer, any_padding=name in UNPADDED)
        kept = counts(optimizer), kinds(optimizer)
        return record, state, (len(stepper.layout.runs), captured, kept, stepper.replays)


def counts(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """The numbers that optimizers keep, parameter by parameter."""
    return [
        {key: float(v) for key, v in optimizer.state[param].items() if not isinstance(v, Tensor) or v.dim() == 0}
        for group in optimizer.param_groups
        for param in group["params"]
        if param in optimizer.state
    ]


def kinds(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Return the state of optimizers, parameter by parameter, in its order."""
    return [
        [(key, getattr(value, "dtype", type(value))) for key, value in optimizer.state[param].items()]
        for group in optimizer.param_groups
        for param in group["params"]
        if param in optimizer.state
    ]


def compare(
    ranks: Ranks,
    world_size: int,
    name: str,
    event: Event,
    emulate: bool,
    run: Callable[..., Any] = train_sharded_steps,
    rtol: float = 1e-5,
    **options: Any,
) -> list[Any]:
    model = build(Parts)
    model.__dict__["_parameters_of_later"] = lambda: model.later.weight
    model.later.requires_grad_(event is not unfreeze_and_add)
    optimizer = OPTIMIZERS[name](model)
    expected = train(model, optimizer, event, None)
    names = {param: key for key, param in model.named_parameters()}
    found = []
    for record, state, facts in ranks.run(world_size, run, name, event, emulate, **options):
        assert_close_relative([norm for norm, _ in record], [norm for norm, _ in expected], rtol, what="norms")
        assert_close_relative(
            [params for _, params in record], [p for _, p in expected], rtol, atol=1e-7, what="params"
        )
        theirs = {
            f"{names[param]}.{key}": value
            for param, entries in optimizer.state.items()
            for key, value in entries.items()
            if isinstance(value, Tensor) and value.dim()
        }
        assert_close_relative(state, theirs, 10 * rtol, atol=1e-7, what="state")
        numbers, types = facts[2]
        assert_close_relative(numbers, counts(optimizer), 1e-6, what="numbers")
        assert types == kinds(optimizer)
        found.append(facts)
    return found
