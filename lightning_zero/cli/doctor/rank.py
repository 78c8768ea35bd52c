"""One rank of the self-test: ``python -m lightning_zero.cli.doctor.rank FILE``, with torchrun's variables. Imports
nothing of Lightning.

Trains a tiny model whose weights are shards, and the same model whole on all ranks' samples, and compares. Rank 0
writes what it found, and what the engine says of itself, into FILE as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.config import EngineConfig
from lightning_zero.engine import Engine
from lightning_zero.native.load import load

__all__ = ["TINY_STEPS", "train_and_compare"]

TINY_STEPS = 8  # of which the last are replayed, where there are replays
SAMPLES, WIDTH, LAYERS = 8, 61, 3  # no number of ranks divides a weight: there is padding
CLIP = 0.5
TOLERANCE = 1e-4  # relative, in float32: another order of summation
TIMEOUT = timedelta(seconds=60)


class Tiny(nn.Module):
    """Layers that are equal, so that what repeats is compiled as in a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def train_and_compare(device: torch.device) -> dict[str, Any]:
    """What both trainings came to, and how the engine did it. ``torch.distributed`` must be initialised. Collective."""
    plain_losses, plain_weights = _train_plain(_model(device), device)
    config = EngineConfig(compile_backend="aot_eager", timeout=TIMEOUT)
    engine = Engine(device, config)
    model = _model(device)
    engine.shard(model)
    with engine.shards_in_sight():
        optimizer = _optimizer(model)
    losses = []
    for whole in _batches(device, engine.world_size):
        batch = whole.chunk(engine.world_size)[engine.rank]
        with engine.train_step():
            loss = _loss(model, batch)
        loss.backward()
        with engine.optimizers.stepping(optimizer, clip=CLIP):
            optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
    with engine.full_parameters(writeback=False):
        weights = [param.detach().clone() for param in model.parameters()]
    apart = max(
        _apart(torch.tensor(losses), torch.tensor(plain_losses)),
        *(_apart(one, other) for one, other in zip(weights, plain_weights, strict=True)),
    )
    stepper = engine.optimizers.stepper(optimizer)
    counters = engine.executor.counters()
    found = {
        "ranks": engine.world_size,
        "backend": dist.get_backend(),
        "losses": losses,
        "plain_losses": plain_losses,
        "largest_difference": apart,
        "equal": apart <= TOLERANCE,  # false for NaN
        "transports": engine.peers.describe(),
        "forward_and_backward_replayed": _yes_unless(engine.replays.objection(config)),
        "graphs_replayed": counters.get("replayed_graphs", 0),
        "optimizer_step_replayed": _yes_unless(stepper.why_eager),
        "steps_replayed": stepper.replays,
    }
    engine.close()
    return found


def _yes_unless(reason: str | None) -> str:
    return f"no: {reason}" if reason else "yes"


def _model(device: torch.device) -> Tiny:
    torch.manual_seed(0)
    return Tiny().to(device)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # The usual eps would make a full step out of a gradient that is rounding noise.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def _batches(device: torch.device, ranks: int) -> Iterator[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    for _ in range(TINY_STEPS):
        yield torch.randn(SAMPLES * ranks, WIDTH, generator=numbers).to(device)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.flip(-1)).square().mean()


def _train_plain(model: Tiny, device: torch.device) -> tuple[list[float], list[Tensor]]:
    optimizer, losses = _optimizer(model), []
    for batch in _batches(device, dist.get_world_size()):
        loss = _loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach() for param in model.parameters()]


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def main(file: str) -> None:
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        load()
        found = train_and_compare(device)
        if dist.get_rank() == 0:
            Path(file).write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
