"""One rank holds whole weights, so compiled code reads the shards themselves. Changes of them must reach the graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from tests.helpers.models import Batch, Case, build, make_batches
from tests.helpers.sharded import adamw, engine_for, whole_params
from tests.ranks.pool import Ranks

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
    with engine_for(model, backend, device=device, **options) as engine:
        if not in_place:
            engine.session.disable_passes(["read_in_place"])
        optimizer = adamw(model)
        for step, on_cpu in enumerate(make_batches(Matrices, STEPS, SAMPLES)):
            batch = on_cpu[0].to(device), on_cpu[1].to(device)
            if step in EDITS:
                EDITS[step](engine, model)
            before = engine.executor.counters().get("gathers", 0)
            with engine.train_step():
                loss = model.loss(batch)
            loss.backward()
            gathered.append(engine.executor.counters().get("gathers", 0) - before)
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            engine.eval_step()
            with torch.no_grad():
                losses += [loss.item(), model.loss(batch).item()]
        counters = engine.executor.counters()
        return {"losses": losses, "gathered": gathered, "params": whole_params(engine, model), "counters": counters}


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen values": ("aot_eager", {}),
    "nf4": ("aot_eager", {"frozen_dtype": "nf4"}),
    "each alone": ("aot_eager", {"frozen_dtype": "int8", "prefetch": False}),
    "stage 2": ("aot_eager", {"stage": 2}),
    "replays": ("aot_eager", {"emulate_cuda_graph_model": True}),
    "replays of nf4": ("aot_eager", {"emulate_cuda_graph_model": True, "frozen_dtype": "nf4"}),
    "kernels": ("inductor", {"frozen_dtype": "nf4"}),
}


def both(way: str) -> tuple[dict[str, Any], dict[str, Any]]:
    backend, options = WAYS[way]
    return train(backend, True, options), train(backend, False, options)


@pytest.mark.parametrize("way", WAYS)
def test_changes_between_steps_reach_graphs_that_gather_nothing(ranks: Ranks, way: str) -> None:
    [(found, copying)] = ranks.run(1, both, way, deadline=240)
    assert found["losses"] == copying["losses"]
    for name, value in copying["params"].items():
        assert torch.equal(found["params"][name], value), name
    # The first step runs eagerly.
    assert not any(found["gathered"][1:]), found["gathered"]
    assert all(copying["gathered"][1:]) or way == "stage 2"
    assert ("replayed_graphs" in found["counters"]) == ("replays" in way)


def change_between_forward_and_backward() -> str:
    model = build(Matrices)
    with engine_for(model) as engine:
        batch = make_batches(Matrices, 1, SAMPLES)[0]
        for change in (False, False, True):
            with engine.train_step():
                loss = model.loss(batch)
            if change:
                with torch.no_grad(), no_shard_dispatch():
                    dict(model.named_parameters())[FROZEN].mul_(2)
            try:
                loss.backward()
            except RuntimeError as error:
                return str(error)
            engine.cycle.before_step()
        return "nothing"


def test_a_frozen_weight_that_changes_before_backward_is_an_error(ranks: Ranks) -> None:
    """As in a plain module, where autograd saves the weight itself."""
    assert "modified by an inplace operation" in ranks.run(1, change_between_forward_and_backward)[0]


class ReturnsItsWeight(Matrices):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.frozen.weight.t()

    def loss(self, batch: Batch) -> Tensor:
        x, y = batch
        found, self.returned = self(x)
        return nn.functional.mse_loss(found, y)


def change_what_a_graph_returned() -> tuple[Tensor, Tensor]:
    model: Any = build(ReturnsItsWeight)
    with engine_for(model) as engine:
        before = whole_params(engine, model)[FROZEN].clone()
        for batch in make_batches(Matrices, 3, SAMPLES):
            with engine.train_step():
                loss = model.loss(batch)
            loss.backward()
            engine.cycle.before_step()
        with torch.no_grad():
            model.returned.zero_()
        return before, whole_params(engine, model)[FROZEN]


def test_a_weight_that_a_graph_returns_is_a_copy(ranks: Ranks) -> None:
    [(before, after)] = ranks.run(1, change_what_a_graph_returned)
    assert torch.equal(before, after)


def gathers_of_a_step(**options: Any) -> int:
    model = build(Matrices)
    with engine_for(model, compute_dtype=torch.bfloat16, **options) as engine:
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
        for batch in make_batches(Matrices, 3, SAMPLES):
            engine.executor.reset_counters()
            with engine.train_step():  # without autocast, in the dtype of master weights
                loss = model.loss(batch)
            loss.backward()
            gathers = engine.executor.counters().get("gathers", 0)
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
        return gathers


def test_shards_in_host_memory_are_not_read_in_place(ranks: Ranks) -> None:
    """Each kernel would read them over the link."""
    assert ranks.run(1, gathers_of_a_step)[0] == 0
    assert ranks.run(1, gathers_of_a_step, offload=("optimizer", "parameters"))[0] >= 3
