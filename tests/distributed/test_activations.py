"""The user chooses which activations are saved; results and lifetimes of weights stay the same."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from tests.helpers.checkpointed import Blocks
from tests.helpers.models import build, make_batches
from tests.helpers.oracle import Reference
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks


def again_in_mlps(op: str, size: int, path: str) -> bool | None:
    return True if "mlp" in path else None


def save_products(op: str, size: int, path: str) -> bool | None:
    return "mm" in op and size > 0


CHOICES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "a little": {"activation_memory_budget": 0.3},
    "nothing": {"activation_memory_budget": 0.0},
    "mlps again": {"recompute": again_in_mlps},
    "products only": {"recompute": save_products},
}


def train(options: dict[str, Any]) -> tuple[Reference, int, list[str], int]:
    """The record, bytes saved for backward, the saved weights, the number of gathers in backward."""
    saved, weights, gathers = 0, [], 0
    model = build(Blocks)
    # All but the one that forward needs last and backward first, which stays.
    shapes = {tuple(param.shape) for param in model.parameters() if param.dim() > 1} - {tuple(model.head.weight.shape)}

    def observe(what: str, graph: Graph) -> None:
        nonlocal saved, gathers
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        if what != "after" or not any("tangents" in node.name for node in inputs):
            return
        for node in inputs:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and not node.name.startswith(("primals", "tangents")):
                saved += value.numel() * value.dtype.itemsize
                if tuple(value.shape) in shapes or tuple(value.shape)[::-1] in shapes:
                    weights.append(f"{node.name} {tuple(value.shape)}")
        gathers += sum("gather_group" in str(node.target) for node in graph.nodes)

    torch._dynamo.reset()
    with engine_for(model, "aot_eager", observe, small_bytes=0, **options) as engine:
        out = train_sharded(engine, model, make_batches(Blocks, 3, 14), sgd(model))
    return out, saved, weights, gathers


def train_all_ways() -> dict[str, Any]:
    return {choice: train(options) for choice, options in CHOICES.items()}


@pytest.mark.slow
def test_saving_less_changes_memory_and_nothing_else(ranks: Ranks) -> None:
    for found in ranks.run(2, train_all_ways, deadline=180):
        expected, usual, _, _ = found.pop("as usual")
        for choice, (out, saved, weights, gathers) in found.items():
            assert out.losses == expected.losses, choice
            assert out.params[-1].keys() == expected.params[-1].keys()
            for name, value in expected.params[-1].items():
                assert out.params[-1][name].equal(value), (choice, name)
            assert saved < usual, choice
            assert weights == [], choice
            assert gathers > 0, choice


class Scaled(nn.Module):
    """Each weight multiplies the result, so a weight times its gradient is the result if backward uses the random
    numbers of forward.
    """

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(4))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer, weight in zip(self.layers, self.weights, strict=True):
            if self.checkpointed:
                x = checkpoint(self.drawing, layer, weight, x, use_reentrant=False)
            else:
                x = self.drawing(layer, weight, x)
        return x.sum()

    @staticmethod
    def drawing(layer: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
        x = F.dropout(layer(x), 0.3) * torch.where(torch.rand_like(x) < 0.5, 2.0, 0.5)
        return torch.ops.aten.native_dropout(x * weight, 0.3, True)[0] * torch.bernoulli(torch.full((6, 8), 0.8))


def errors(backend: str, checkpointed: bool, budget: float) -> list[float]:
    torch.manual_seed(3)
    model, found = Scaled(checkpointed), []
    with engine_for(model, backend, activation_memory_budget=budget) as engine:
        for step in range(3):
            torch.manual_seed(step)
            with engine.train_step():
                loss = model(torch.randn(6, 8))
            loss.backward()
            products = [(param * param.grad).sum() for param in model.parameters()]
            found.append(max((product - loss).abs().item() / max(loss.abs().item(), 1e-3) for product in products))
            for param in model.parameters():
                param.grad = None
    return found


@pytest.mark.parametrize(
    ("backend", "checkpointed", "budget"),
    [
        *(("aot_eager", checkpointed, budget) for checkpointed in (False, True) for budget in (0.3, 0.0)),
        # The saved values are chosen before code is generated.
        pytest.param("inductor", True, 0.3, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive_variants("aot_eager-True-0.3", "aot_eager-False-0.0")
def test_what_is_computed_again_draws_no_other_numbers(
    ranks: Ranks, backend: str, checkpointed: bool, budget: float
) -> None:
    """torch's partitioner, given a budget, computes random numbers again like anything else."""
    (found,) = ranks.run(1, errors, backend, checkpointed, budget, deadline=200)
    assert max(found) < 1e-4
