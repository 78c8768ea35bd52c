"""Modules that call collectives, and ops with effects, in their own forward: compiled, with little saved for backward."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.distributed_c10d import _get_default_group
from torch.fx import Graph

from tests.helpers.models import Case, make_batches
from tests.helpers.oracle import Reference, assert_close_relative, train_reference
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks

STEPS, SAMPLES = 3, 8


def _mean(x: Tensor) -> Tensor:
    total: Tensor = collectives.wait_tensor(collectives.all_reduce(x, "sum", _get_default_group()))
    return total / torch.distributed.get_world_size()


class _MeanOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _mean(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _mean(grad)


class Centred(Case):
    """Subtracts the mean over the samples of all ranks, as synchronised normalization does, and prints in between."""

    def __init__(self, prints: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.prints = prints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            mean = x.mean(0)
            x = x - (_MeanOverRanks.apply(mean) if torch.distributed.is_initialized() else mean)
            if self.prints:
                torch.ops.aten._print("centred")
        return x

    @staticmethod
    def make_batch(seed: int, n: int) -> Any:
        rng = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(n, 16, generator=rng) for _ in range(2))


CHOICES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "nothing": {"activation_memory_budget": 0.0},
    "all again": {"recompute": lambda op, size, path: True},
}


def train() -> tuple[dict[str, Reference], set[str]]:
    found: dict[str, Reference] = {}
    called: set[str] = set()

    def observe(what: str, graph: Graph) -> None:
        called.update(str(node.target) for node in graph.nodes)

    for name, options in CHOICES.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Centred()
        with engine_for(model, "aot_eager", observe, **options) as engine:
            found[name] = train_sharded(engine, model, make_batches(Centred, STEPS, SAMPLES), sgd(model))
    return found, called


def test_a_model_with_collectives_of_its_own_trains_as_one_process_does(ranks: Ranks) -> None:
    torch.manual_seed(0)
    reference = train_reference(Centred(prints=False), make_batches(Centred, STEPS, SAMPLES), sgd, world=1)
    for found, called in ranks.run(2, train, deadline=240):
        assert {"_c10d_functional.all_reduce.default", "with_effects"} <= called
        for name, out in found.items():
            for what in ("losses", "grads", "params"):
                assert_close_relative(getattr(out, what), getattr(reference, what), 2e-5, what=f"{name}: {what}")
