"""A mixture of experts in plain PyTorch: every rank calls the experts that its own tokens chose, and no others.

    python examples/mixture_of_experts.py --accelerator cpu --devices 2 --steps 100

Experts without tokens are not called at all. Ranks that choose differently train together where weights are read out of
the peers' memory: CPUs of one host, and GPUs of one host with CUDA 13. The experts' loop depends on the data, so it is
left to eager code; attention and everything else is compiled.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401 - registers the strategies' names


class Experts(nn.Module):
    """The two best experts for each token, weighted by the router, and a loss that spreads tokens over them."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    @torch.compiler.disable
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, weights[token, place, None] * expert(tokens[token]))
        shares = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        return x + out.view_as(x), len(self.experts) * (shares * probabilities.mean(0)).sum()


class Model(L.LightningModule):
    def __init__(self, width: int = 64, experts: int = 8, layers: int = 2, vocabulary: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, width, 0.0, batch_first=True) for _ in range(layers)
        )
        self.experts = nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        tokens = batch[0]
        x, balance = self.embedding(tokens), torch.zeros((), device=tokens.device)
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x, more = experts(attention(x))
            balance = balance + more
        loss = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss + 0.01 * balance

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(arguments: list[str] | None = None) -> L.Trainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(arguments)
    L.seed_everything(0)
    rows = (torch.arange(32) * torch.randint(1, 5, (4096, 1)) + torch.randint(64, (4096, 1))) % 64  # counting in steps
    trainer = L.Trainer(
        strategy="zero3_compile",
        accelerator=args.accelerator,
        devices=args.devices,
        max_steps=args.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(rows), batch_size=16, shuffle=True))
    print(f"loss {trainer.callback_metrics['train_loss']:.3f}")
    return trainer


if __name__ == "__main__":
    main()
