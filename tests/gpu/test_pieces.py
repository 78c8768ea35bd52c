"""Layers that are computed again in backward, with the random numbers of forward, are compiled once for all on GPUs."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.compat.compiler import functorch_config
from tests.helpers.logs import logged
from tests.helpers.models import Case, build
from tests.helpers.oracle import Batch, assert_close_relative
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(1)

WIDTH, LENGTH = 64, 32


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), dropout
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + F.dropout(self.out(found.transpose(1, 2).flatten(2)), self.dropout)


class Checkpointed(Case):
    """Attention counts as random, also where it drops nothing."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(self.dropout) for _ in range(6))

    @classmethod
    def make_batch(cls, seed: int, n: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(n, LENGTH, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Dropping(Checkpointed):
    dropout = 0.1


def train(case: type[Case], **options: Any) -> tuple[Any, list[str]]:
    device = torch.device("cuda", torch.cuda.current_device())
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build(case)
    batches = [tuple(part.to(device) for part in model.make_batch(step, 8)) for step in range(6)]
    with (
        logged("lightning_zero.compile.backend") as lines,
        functorch_config.patch(enable_autograd_cache=False),
        engine_for(model, "inductor", device=str(device), gather_group_mb=0.02, **options) as engine,
        torch.autocast("cuda", torch.bfloat16, cache_enabled=False),
    ):
        record = train_sharded(engine, model, batches, sgd(model))
        return record, [line for line in lines if line.startswith("Subgraphs: compiled")]


def train_both(case: type[Case]) -> tuple[Any, Any]:
    return train(case), train(case, compile_whole_graphs=True)


@pytest.mark.parametrize("case", [Checkpointed, Dropping])
def test_checkpointed_layers_run_in_pieces_and_train_as_in_a_whole_graph(ranks: Ranks, case: type[Case]) -> None:
    (mine, lines), (whole, none) = ranks.run(1, train_both, case, backend="nccl", deadline=300)[0]
    assert not none
    cut = [list(map(int, re.findall(r"(?:calls|new)=(\d+)", line))) for line in lines]
    assert len(cut) == 2, lines  # forward and backward
    assert all(new < calls for calls, new in cut)
    assert_close_relative(mine.losses, whole.losses, 1e-3, what="losses")
    assert_close_relative(mine.params, whole.params, 1e-2, what="weights")
