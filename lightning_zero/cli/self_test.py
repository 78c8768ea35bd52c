"""Train a tiny model with and without sharding on all devices of this machine, and compare.

:func:`self_test` starts the ranks. Each runs :func:`main` with torchrun's variables and does not import Lightning.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.cli.local_ranks import run_ranks
from lightning_zero.config import EngineConfig
from lightning_zero.engine import Engine
from lightning_zero.native.load import load
from lightning_zero.subprocess_main import program_without_lightning

RANK_COMMAND = ("-c", program_without_lightning("from lightning_zero.cli.self_test import main\nmain()"))
STEPS = 8  # the last ones replay CUDA graphs
SAMPLES, WIDTH, LAYERS = 8, 61, 3  # samples per rank; a prime width, so that shards are padded
CLIP = 0.5  # the largest norm of gradients
TOLERANCE = 1e-4  # relative, in float32, for another order of summation
TIMEOUT = timedelta(seconds=60)  # of collectives


def self_test(limit_s: float, rank: Sequence[str] = RANK_COMMAND) -> dict[str, Any]:
    """Return the results of rank 0 and ``failed``, the reason if the test fails.

    The C++ executor must be built.

    There is one rank of ``python RANK FILE`` for each GPU, or two on the CPU, where they share the cores.
    """
    gpus = torch.cuda.is_available()
    world_size, environment = (torch.cuda.device_count(), {}) if gpus else (2, {"OMP_NUM_THREADS": "1"})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        end = run_ranks([*rank, str(file)], world_size, limit_s, environment)
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    failed = end.failed or ("" if found else "rank 0 ended without a result")
    if not failed and not found["equal"]:
        failed = (
            "sharded training gives other weights or losses than plain training (largest relative difference "
            f"{found['largest_difference']:.2g})"
        )
    return found | {"seconds": round(end.seconds, 1), "failed": failed}


def main() -> None:
    """Run one rank; rank 0 writes its results as JSON to the file that the last argument names."""
    atexit.register(gc.freeze)  # as in cli/main.py
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        load()
        found = train_and_compare(device)
        if dist.get_rank() == 0:
            Path(sys.argv[-1]).write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def train_and_compare(device: torch.device) -> dict[str, Any]:
    """Return losses of a sharded training, its difference from a plain one, and the features in use.

    Collective. ``torch.distributed`` must be initialized.
    """
    plain_losses, plain_weights, _ = _train(device, None)
    config = EngineConfig(compile_backend="aot_eager", timeout=TIMEOUT)
    engine = Engine(device, config)
    losses, weights, optimizer = _train(device, engine)
    pairs = [(torch.tensor(losses), torch.tensor(plain_losses)), *zip(weights, plain_weights, strict=True)]
    difference = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    stepper, objection = engine.optimizers.stepper(optimizer), engine.cuda_graphs.unsupported_reason(config)
    found = {
        "ranks": engine.world_size,
        "backend": dist.get_backend(),
        "losses": losses,
        "largest_difference": difference,
        "equal": difference <= TOLERANCE,  # false for NaN
        "transports": engine.transports.describe(),
        "forward_and_backward_replayed": f"no: {objection}" if objection else "yes",
        "graphs_replayed": engine.executor.counters().get("replayed_graphs", 0),
        "optimizer_step_replayed": f"no: {stepper.eager_reason}" if stepper.eager_reason else "yes",
        "steps_replayed": stepper.replays,
    }
    engine.close()
    return found


def _train(device: torch.device, engine: Engine | None) -> tuple[list[float], list[Tensor], torch.optim.Optimizer]:
    """Train on this rank's samples by the engine, or on the samples of all ranks without it."""
    torch.manual_seed(0)
    # Equal layers, so that the engine compiles one of them.
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    model, losses = nn.Sequential(*layers).to(device), []
    if engine is not None:
        engine.shard(model)
    with nullcontext() if engine is None else engine.registered_parameters():
        # With the default eps, a gradient that is only rounding noise would make a full step.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    world_size, numbers = dist.get_world_size(), torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = torch.randn(SAMPLES * world_size, WIDTH, generator=numbers).to(device)
        if engine is not None:
            batch = batch.chunk(world_size)[engine.rank]
        with nullcontext() if engine is None else engine.train_step():
            loss = (batch + model(batch) - batch.flip(-1)).square().mean()
        loss.backward()
        if engine is None:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with nullcontext() if engine is None else engine.optimizers.stepping(optimizer, clip=CLIP):
            optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double() / world_size
        dist.all_reduce(mean)
        losses.append(mean.item())
    with nullcontext() if engine is None else engine.full_parameters(writeback=False):
        return losses, [param.detach().clone() for param in model.parameters()], optimizer
