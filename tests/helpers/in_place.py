"""Train a model whose weights one rank reads in place, with changes of them between steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from tests.helpers.models import Batch, Case, build, make_batches
from tests.helpers.sharded import adamw, engine_for, whole_params

STEPS, SAMPLES = 12, 12
FROZEN, TRAINED = "frozen.weight", "second.weight"


class Matrices(Case):
    """Every weight can be read in place: none is a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.second = (nn.Linear(a, b, bias=False) for a, b in ((23, 25), (25, 31), (31, 19)))
        self.frozen.requires_grad_(False)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 23, generator=rng), torch.randn(n, 19, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


def write_to_what_was_read(engine: Engine, model: Any) -> None:
    with torch.no_grad():
        model.second.weight.mul_(1.5)
        if engine.config.frozen_dtype is None:
            model.frozen.weight.mul_(1.5)


def write_full_parameters(engine: Engine, model: Any) -> None:
    with engine.full_parameters(), torch.no_grad():
        model.frozen.weight.mul_(0.5)
        model.second.weight.add_(0.1)


def load_other_values(engine: Engine, model: Any) -> None:
    model.load_state_dict({name: value * 0.75 for name, value in model.state_dict().items()})


def assign_data(engine: Engine, model: Any) -> None:
    named = dict(model.named_parameters())
    for name in (TRAINED,) if engine.config.frozen_dtype else (TRAINED, FROZEN):
        named[name].data = named[name].detach() * 1.25


EDITS: dict[int, Callable[[Engine, Any], None]] = {
    3: write_to_what_was_read,
    5: write_full_parameters,
    7: load_other_values,
    9: assign_data,
}


def train(backend: str, in_place: bool, options: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    model = build(Matrices)
    losses, gathered = [], []
    narrow = torch.autocast(device.split(":")[0], torch.bfloat16, enabled=options.get("compute_dtype") is not None)
    with engine_for(model, backend, device=device, **options) as engine:
        if not in_place:
            engine.session.disable_passes(["read_in_place"])
        optimizer = adamw(model)
        for step, on_cpu in enumerate(make_batches(Matrices, STEPS, SAMPLES)):
            batch = on_cpu[0].to(device), on_cpu[1].to(device)
            if step in EDITS:
                EDITS[step](engine, model)
            before = engine.executor.counters().get("gathers", 0)
            with engine.train_step(), narrow:
                loss = model.loss(batch)
            loss.backward()
            gathered.append(engine.executor.counters().get("gathers", 0) - before)
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            engine.eval_step()
            with torch.no_grad(), narrow:
                losses += [loss.item(), model.loss(batch).item()]
        counters = engine.executor.counters()
        return {"losses": losses, "gathered": gathered, "params": whole_params(engine, model), "counters": counters}
