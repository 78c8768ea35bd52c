"""One rank holds whole weights, so compiled code reads the shards themselves. Changes of them must reach the graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from tests.helpers.in_place import FROZEN, SAMPLES, Matrices, train
from tests.helpers.models import Batch, build, make_batches
from tests.helpers.sharded import engine_for, whole_grads, whole_params
from tests.ranks.pool import Ranks

BF16 = {"compute_dtype": torch.bfloat16}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen values": ("aot_eager", {}),
    "nf4": ("aot_eager", {"frozen_dtype": "nf4"}),
    "each alone": ("aot_eager", {"frozen_dtype": "int8", "prefetch": False}),
    "stage 2": ("aot_eager", {"stage": 2}),
    "replays": ("aot_eager", {"emulate_cuda_graph_model": True}),
    "replays of nf4": ("aot_eager", {"emulate_cuda_graph_model": True, "frozen_dtype": "nf4"}),
    "bf16": ("aot_eager", BF16),
    "bf16, each alone": ("aot_eager", {**BF16, "prefetch": False}),
    "bf16, gradients over weights": ("aot_eager", {**BF16, "grad_aliasing": True}),
    "replays of bf16, gradients over weights": (
        "aot_eager",
        {**BF16, "grad_aliasing": True, "emulate_cuda_graph_model": True},
    ),
    "bf16 kernels, gradients over weights": ("inductor", {**BF16, "grad_aliasing": True}),
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


class Detached(nn.Module):
    """A weight without a gradient, which backward still reads after the last gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.trained = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.read.weight.detach()
        hidden = torch.tanh(self.trained(torch.tanh(nn.functional.linear(x, weight))))
        return nn.functional.linear(hidden, weight)


def input_gradients(in_place: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, found = Detached(), []
    with engine_for(model, compute_dtype=torch.bfloat16, grad_aliasing=in_place) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            x = torch.randn(8, 16, requires_grad=True)
            with engine.train_step(), torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            found.append(x.grad)
    return found


def compare_input_gradients() -> bool:
    return all(map(torch.equal, input_gradients(True), input_gradients(False)))


def test_memory_of_a_weight_without_gradient_is_not_cleared_while_it_is_read(ranks: Ranks) -> None:
    assert ranks.run(1, compare_input_gradients)[0]


class Scaled(nn.Module):
    """A kernel multiplies by the scale after the gradient of the scale is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 48, bias=False), nn.Linear(48, 48, bias=False)
        self.scale = nn.Parameter(torch.randn(48))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).bfloat16()
        return self.second(hidden * self.scale.bfloat16())


def gradients_of_kernels(over_weights: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Scaled()
    # Each gradient is reduced at once, and each kernel computes one value.
    options: dict[str, Any] = {"reduce_group_mb": 1e-6, "reduce_bucket_mb": 1e-4, "grad_aliasing": over_weights}
    with (
        torch._inductor.config.patch(max_fusion_size=1),
        engine_for(model, "inductor", compute_dtype=torch.bfloat16, **options) as engine,
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        found: list[Tensor] = []
        for _ in range(3):
            with engine.train_step(), torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(8, 48)).float().square().mean()
            loss.backward()
            found += [grad.float() for grad in whole_grads(engine, model).values() if grad is not None]
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
        return found


def compare_gradients_of_kernels() -> float:
    pairs = zip(gradients_of_kernels(True), gradients_of_kernels(False), strict=True)
    return max(((found - expected).norm() / expected.norm()).item() for found, expected in pairs)


def test_kernels_that_read_a_weight_run_before_its_gradient_overwrites_it(ranks: Ranks) -> None:
    assert ranks.run(1, compare_gradients_of_kernels, deadline=240)[0] < 0.02
