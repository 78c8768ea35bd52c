"""Train with rounded state or weights on exact gradients, which are equal to the bit on 1, 2 and 3 ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.report.engine_report import memory_by_role
from tests.helpers.sharded import engine_for, whole_params

STEPS, STAGE = 6, {1: 3, 2: 2, 3: 1}
BF16, FP32 = torch.bfloat16, torch.float32


class Sums(nn.Module):
    """Its gradients are small multiples of 3, which sums and means over 2 and 3 ranks leave exact."""

    def __init__(self, image: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.image = image
        self.large, self.small, self.other = nn.Linear(61, 70), nn.Linear(9, 9), nn.Linear(65, 64, bias=False)
        self.conv = nn.Conv2d(16, 32, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.frozen = nn.Linear(70, 70)
        self.frozen.requires_grad_(False)

    def forward(self, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(step)
        layers: tuple[nn.Linear, ...] = (self.large, self.small, self.other)
        dtype = torch.float32 if self.large.weight.dtype is FP32 else BF16
        batches = [torch.randint(-4, 5, (2, layer.in_features), generator=rng).to(dtype) for layer in layers]
        image = torch.randint(-4, 5, (1, 16, self.image, self.image), generator=rng).to(dtype)
        return 6 * self.conv(image).sum() + 6 * sum(
            (layer(x).sum() for layer, x in zip(layers, batches, strict=True)), torch.zeros((), dtype=dtype)
        )


def make_optimizer(model: Any, kind: str = "AdamW") -> torch.optim.Optimizer:
    groups = [{"params": [model.large.weight, model.small.weight]}, {"params": [model.large.bias, model.small.bias]}]
    groups += [{"params": [model.other.weight, model.conv.weight], "lr": 0.01}]
    if kind == "SGD":
        return torch.optim.SGD(groups, lr=0.001)
    if kind == "Muon":
        matrices = [model.large.weight, model.small.weight, model.other.weight]
        return torch.optim.Muon(matrices, lr=0.02)
    return torch.optim.AdamW(groups, lr=0.02)


def train(
    home: str,
    name: str | None = None,
    save: bool = False,
    sharded: bool = True,
    steps: int = STEPS,
    kind: str = "AdamW",
    dtype: torch.dtype = FP32,
    image: int = 3,
    **options: Any,
) -> dict[str, Any]:
    """Train, from the state of file ``name`` if it exists; return weights, full state and the memory of each role."""
    model: Any = Sums(image).to(dtype)
    options = {"offload_buffer_mb": 0.02} | options
    with engine_for(model, "eager", **options) as engine:
        with engine.registered_parameters():
            optimizer = make_optimizer(model, kind)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        first = 0
        if name is not None and not save:
            path = f"{home}/{name}"
            loaded: Any = engine.checkpoints.open(path).state() if sharded else torch.load(path, mmap=True)
            with engine.full_parameters(model):
                model.load_state_dict({key: value.clone() for key, value in loaded["model"].items()})
            engine.load_optimizer_state(optimizer, loaded["optimizer"])
            first = STEPS // 2
        for step in range(first, steps):
            for micro_batch in (step, step + 100):
                with engine.train_step():
                    loss = model(micro_batch) / 2
                loss.backward()
            with engine.optimizers.stepping(optimizer, clip=1e9):
                optimizer.step()
            optimizer.zero_grad()
        weights = whole_params(engine, model)
        state = engine.optimizer_state(optimizer)
        if save:
            engine.checkpoints.save(
                f"{home}/{name}",
                {
                    "model": engine.checkpoints.model_state(True),
                    "optimizer": engine.checkpoints.optimizer_state(optimizer, True),
                },
            )
            if engine.rank == 0:
                torch.save({"model": weights, "optimizer": state}, f"{home}/{name}.pt")
        roles = memory_by_role(engine, [optimizer])
        dtypes = {key: value.dtype for key, value in optimizer.state.get(model.large.weight, {}).items()}
        return {"weights": weights, "state": state.get("state", {}), "roles": roles, "dtypes": dtypes}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)
    if found["state"]:  # on rank 0
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
