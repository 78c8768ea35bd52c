"""A model with linear layers that are computed in fp8 and others that are not, and its options and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.sharding.weight_format import WeightFormat, WeightKind
from tests.helpers.fp8_oracle import Fp8Linear, with_fp8_layers
from tests.helpers.sharded import sgd

STEPS, ACCUMULATE, CLIP = 3, 2, 0.5
EVALUATION = 100  # number of the batch
FP8_LAYERS = ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "frozen", "shared")
OPTIONS: dict[str, Any] = {
    "linear_dtype": "fp8",
    "fp8_min_gain": 0,
    "fp8_exclude": ("kept.*",),
    "compute_dtype": torch.bfloat16,
    "reduce_dtype": torch.float32,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Has a checkpointed layer, a frozen one, one that is called twice, a tied head and layers that stay in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen, self.shared = nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32)
        self.router, self.kept = nn.Linear(32, 24, bias=False), nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = self.blocks[1](x)
        x = x + self.shared(self.frozen(F.silu(self.shared(x))))
        x = self.kept(x) * self.router(x).mean(-1, keepdim=True)
        return self.head(x)


def batch(index: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(index))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def loss_of(model: nn.Module, index: int) -> Tensor:
    ids, targets = batch(index)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # it would add gradients up in bfloat16
        return F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return loss_of(model, EVALUATION).item()


def train_plain(
    after_step: Callable[[nn.Module, int], list[float]],
    fp8: bool = True,
    of_masters: bool = False,
    by_row: bool = False,
    frozen_dtype: WeightKind | None = None,
) -> dict[str, Any]:
    """Train the plain model with the same casts. The first forward of an engine is not compiled.

    Args:
        after_step: Returns losses to add, from the model and the number of the micro-batch.
        fp8: Cast at all.
        of_masters: Cast master weights, not their compute copies.
        by_row: Scale rows and columns, not matrices.
        frozen_dtype: Of the codes whose values the frozen weight has. Without ``by_row`` they are cast as float32.

    Returns:
        Losses, weights, and the health of fp8 layers in the last step.
    """
    model = with_fp8_layers(Model(), FP8_LAYERS)
    if frozen_dtype is not None:
        frozen = cast(Fp8Linear, model.get_submodule("frozen"))
        packing = WeightFormat(frozen_dtype, frozen.weight.shape, torch.float32)
        frozen.weight.data = packing.decode(packing.encode(frozen.weight))
        frozen.of_masters = not by_row
    optimizer = sgd(model)
    losses = []
    Fp8Linear.of_masters, Fp8Linear.by_row = of_masters, by_row
    try:
        for index in range(STEPS * ACCUMULATE):
            Fp8Linear.on = fp8 and index > 0
            for name in FP8_LAYERS if index % ACCUMULATE == 0 else ():
                model.get_submodule(name).health.clear()
            loss = loss_of(model, index)
            (loss / ACCUMULATE).backward()
            losses.append(loss.item())
            if index % ACCUMULATE:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                losses += after_step(model, index)
    finally:
        Fp8Linear.on = Fp8Linear.of_masters = Fp8Linear.by_row = False
    health = {
        f"{name}.weight/{key}": number
        for name in FP8_LAYERS
        for key, number in model.get_submodule(name).health.items()
    }
    return {
        "health": health,
        "losses": losses,
        "params": {name: p.detach().clone() for name, p in model.named_parameters()},
    }
