"""A training loop under Fabric, with a toy model on two processes: python examples/fabric_loop.py"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_zero import FabricZeroStrategy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--accelerator", default="cpu")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--compile-backend", default="inductor", help="aot_eager generates no code, to debug")
parser.add_argument("--out", type=Path, default=Path("runs/fabric.pt"))
args = parser.parse_args()

strategy = FabricZeroStrategy(compile_backend=args.compile_backend)
fabric = Fabric(accelerator=args.accelerator, devices=args.devices, strategy=strategy)
fabric.launch()
fabric.seed_everything(0, verbose=False)

with fabric.init_module():  # every layer is sharded as soon as it is built
    model = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))

data = torch.Generator(fabric.device).manual_seed(fabric.global_rank)
for step in range(100):
    for micro_batch in range(2):
        x = torch.randn(64, 8, device=fabric.device, generator=data)
        with fabric.no_backward_sync(model, enabled=micro_batch == 0):
            loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
            fabric.backward(loss / 2)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 33 == 0:
        fabric.print(f"step {step}: loss {fabric.all_reduce(loss.detach()):.3f}")

fabric.save(args.out, {"model": model, "optimizer": optimizer, "step": step})  # whole values, for any model or strategy
