"""Compare rules for sharded parameters with the optimizers' own packages; prints a Markdown table.

    torchrun --nproc-per-node 2 examples/benchmarks/optimizer_rules.py --steps 20

All ranks train one small network twice, on the CPU: in plain torch with the package's optimizer on the whole batch, and
sharded, with each rank's part of the batch. Columns are the largest difference of a weight, and the largest change of a
weight in the training. Packages that are not installed are left out.
"""

import argparse
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.config import EngineConfig
from lightning_zero.engine import Engine
from lightning_zero.optim.matrix_rules import muon
from lightning_zero.optim.newton_schulz import newton_schulz
from lightning_zero.optim.normuon import normuon

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
# SOAP needs gradients of full rank: the eigenvectors of others depend on rounding errors.
ROWS = {"pytorch_optimizer.SOAP": 96}  # of a batch; 12 for others


class Net(nn.Module):
    """Matrices of several shapes, a convolution and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = nn.Linear(61, 70), nn.Linear(70, 210), nn.Linear(210, 33)
        self.conv = nn.Conv2d(2, 5, 3, padding=1, bias=False)  # a bias has no gradient before LayerNorm
        self.norm = nn.LayerNorm(70)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.conv(x.view(-1, 2, 5, 7)).mean(1).repeat(1, 1, 2).view(-1, 70)
        return self.last(torch.tanh(self.middle(self.norm(x))))


class NorMuon(torch.optim.Muon):
    """The settings of NorMuon; its rule makes the steps."""

    def __init__(self, params: Iterable[Tensor], muon_beta2: float, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group["muon_beta2"] = muon_beta2


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` under another name, as a user's own class."""


def matrices(params: Iterable[Tensor], ours: type[torch.optim.Muon], split: bool = False, **options: Any) -> Any:
    """Return an optimizer of the two-dimensional weights; with ``split``, of the middle one in three parts."""
    chosen = [param for param in params if param.ndim == 2]
    groups = [{"params": chosen[1:2], "split_sizes": (140, 35, 35)}, {"params": [chosen[0], *chosen[2:]]}]
    return ours(groups if split else chosen, lr=0.02, weight_decay=0.01, **options)


def dions(params: Iterable[Tensor], name: str, split: bool = False, **options: Any) -> Any:
    """Return an optimizer of the package ``dion``, with the Newton-Schulz iteration of ``torch.optim.Muon``."""

    def orthogonalize(updates: Tensor, epsilon: Any = 0.0) -> Tensor:
        whole = updates if updates.dim() == 3 else updates[None]
        return newton_schulz(whole.bfloat16(), COEFFICIENTS, 5, 1e-7).view(updates.shape)

    chosen = [param for param in params if param.ndim == 2]
    groups = [{"params": chosen[1:2], "split_sizes": (140, 35, 35)}, {"params": [chosen[0], *chosen[2:]]}]
    make = getattr(importlib.import_module("dion"), name)
    options |= {"lr": 0.02, "mu": 0.95, "weight_decay": 0.01, "nesterov": True, "newton_schulz_func": orthogonalize}
    return make(groups if split else chosen, **options)


def libraries() -> dict[str, tuple[Make, Make]]:
    """Return (the optimizer in plain torch, the optimizer on shards) by name."""
    torchs = {
        "torch.optim.Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02, weight_decay=0.1),
        "torch.optim.Adafactor, d=1.5, eps": lambda p: torch.optim.Adafactor(p, lr=0.02, d=1.5, eps=(1e-6, 1e-2)),
    }
    found: dict[str, tuple[Make, Make]] = {name: (make, make) for name, make in torchs.items()}
    try:
        library: Any = importlib.import_module("pytorch_optimizer")
    except ImportError:
        pass
    else:
        makes: dict[str, Make] = {
            "pytorch_optimizer.Lamb": lambda p: library.Lamb(p, lr=0.005, eps=1e-4, weight_decay=0.1),
            "pytorch_optimizer.Lamb, adam=True": lambda p: library.Lamb(p, lr=0.005, eps=1e-4, adam=True),
            "pytorch_optimizer.LARS": lambda p: library.LARS(p, lr=0.5, weight_decay=0.1, trust_coefficient=0.02),
            "pytorch_optimizer.LARS, nesterov": lambda p: library.LARS(p, lr=0.5, nesterov=True, dampening=0.1),
        }
        makes["pytorch_optimizer.SOAP"] = lambda p: library.SOAP(
            [param for param in p if param.ndim == 2],
            lr=0.005,
            eps=1e-4,
            precondition_frequency=3,
            max_precondition_dim=69,
        )
        found |= {name: (make, make) for name, make in makes.items()}
    try:
        importlib.import_module("dion")
    except ImportError:
        return found
    rms = {"adjust_lr_fn": "match_rms_adamw"}
    return found | {
        "dion.NorMuon": (
            lambda p: dions(p, "NorMuon", muon_beta2=0.9, adjust_lr="rms_norm"),
            lambda p: matrices(p, NorMuon, muon_beta2=0.9, **rms),
        ),
        "dion.NorMuon, split_sizes": (
            lambda p: dions(p, "NorMuon", split=True, muon_beta2=0.9, adjust_lr="rms_norm"),
            lambda p: matrices(p, NorMuon, split=True, muon_beta2=0.9, **rms),
        ),
        "dion.Muon, split_sizes": (
            lambda p: dions(p, "Muon", split=True, adjust_lr="rms_norm"),
            lambda p: matrices(p, Muon, split=True, **rms),
        ),
    }


def batch(step: int, rank: int, ranks: int, rows: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    x, y = torch.randn(rows, 61, generator=rng), torch.randn(rows, 33, generator=rng)
    return x[rank::ranks], y[rank::ranks]


def plain(make: Make, steps: int, rows: int) -> list[Tensor]:
    model = Net()
    optimizer = make(list(model.parameters()))
    for step in range(steps):
        x, y = batch(step, 0, 1, rows)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def sharded(make: Make, steps: int, rows: int) -> list[Tensor]:
    model = Net()
    engine = Engine(torch.device("cpu"), EngineConfig(compile=False))
    engine.shard(model)
    optimizer = make(list(model.parameters()))
    engine.optimizers.check(optimizer)
    engine.optimizers.arrange([optimizer])
    for step in range(steps):
        x, y = batch(step, engine.rank, engine.world_size, rows)
        with engine.train_step():
            loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        with engine.optimizers.stepping(optimizer):
            optimizer.step()
        optimizer.zero_grad()
    with engine.full_parameters():
        found = [param.detach().clone() for param in model.parameters()]
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    lightning_zero.register_matrix_rule(NorMuon, normuon)
    lightning_zero.register_matrix_rule(Muon, muon)
    dist.init_process_group("gloo")
    lines = ["| optimizer | largest difference of a weight | largest change of a weight |", "|---|---|---|"]
    begin = [param.detach() for param in Net().parameters()]
    for name, (reference, ours) in libraries().items():
        rows = ROWS.get(name, 12)
        expected, found = plain(reference, steps, rows), sharded(ours, steps, rows)
        difference = max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))
        change = max(float((a - b).abs().max()) for a, b in zip(expected, begin, strict=True))
        lines.append(f"| `{name}` | {difference:.1e} | {change:.2f} |")
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
