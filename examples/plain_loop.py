"""A training loop in plain PyTorch, with a toy model: torchrun --nproc-per-node 2 examples/plain_loop.py"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import Engine, EngineConfig

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--compile-backend", default="inductor", help="aot_eager generates no code, to debug")
parser.add_argument("--out", type=Path, default=Path("runs/plain.pt"))
args = parser.parse_args()

dist.init_process_group("gloo")  # on GPUs: "nccl", and torch.device("cuda", local rank) below
device, rank = torch.device("cpu"), dist.get_rank()
engine = Engine(device, EngineConfig(compile_backend=args.compile_backend), report=print if rank == 0 else None)
torch.manual_seed(0)
with engine.construction():  # every layer is sharded as soon as it is built
    model = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
engine.shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine.optimizers.check(optimizer)

data = torch.Generator(device).manual_seed(rank)
for step in range(100):
    for _ in range(2):  # gradients are reduced in each backward, and add up until zero_grad()
        x = torch.randn(64, 8, device=device, generator=data)
        with engine.train_step():
            loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        (loss / 2).backward()
    with engine.optimizers.stepping(optimizer, clip=1.0) as norm:
        optimizer.step()
    optimizer.zero_grad()
    if step % 33 == 0 and rank == 0:
        print(f"step {step}: loss {loss.item():.3f}, norm of gradients {norm.item():.3f}")

engine.eval_step()
with torch.no_grad():
    model(torch.zeros(1, 8, device=device))
state = {"model": engine.model_state(), "optimizer": engine.optimizer_state(optimizer), "step": step}  # on every rank
if rank == 0:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, args.out)
engine.close()
dist.destroy_process_group()
