"""A user's loop of which one rank fails. Run by test_examples.py."""

import os

import torch
from lightning.fabric import Fabric

import lightning_zero  # noqa: F401 - registers the strategies


def main() -> None:
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="zero3")
    fabric.launch()
    model = torch.nn.Linear(64, 64)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(1000):
        if step == 3 and fabric.global_rank == int(os.environ["FAILS"]):
            raise ZeroDivisionError("this rank's own")
        fabric.backward(model(torch.ones(2, 64)).sum())
        optimizer.step()
