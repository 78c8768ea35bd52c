"""A byte-level GPT, the decoder most language models use today, and the LightningModule that trains it.

Every module that owns parameters has a `reset_parameters` that gives them their starting values. That is all a model
needs to be built on the meta device and filled in shard by shard. There are no buffers: the rotary angles are computed
in the forward, where the compiler fuses them away.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

VOCAB = 256


@dataclass(frozen=True)
class GPTShape:
    dim: int
    layers: int
    heads: int
    hidden: int


SHAPES = {
    "tiny": GPTShape(192, 4, 6, 512),
    "30m": GPTShape(512, 9, 8, 1408),
    "124m": GPTShape(768, 18, 12, 1984),
    "350m": GPTShape(1024, 24, 16, 2816),
    "1b": GPTShape(2048, 24, 16, 5632),
    "3b": GPTShape(3072, 26, 24, 8192),
    "7b": GPTShape(4096, 32, 32, 11008),
}


class Projection(nn.Linear):
    """A linear map without bias; `gain` scales its starting values."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        self.gain = gain  # set first: the parent's constructor calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.gain * self.in_features**-0.5)


class ByteEmbedding(nn.Embedding):
    """Also the output layer, so it starts small: the first logits should be close to uniform."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def rotary_angles(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rates = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), rates)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    # The product is float32 whatever x is: low-precision angles blur distant positions.
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: GPTShape, gain: float) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = Projection(shape.dim, 3 * shape.dim)
        self.out = Projection(shape.dim, shape.dim, gain)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class SwiGLU(nn.Module):
    def __init__(self, shape: GPTShape, gain: float) -> None:
        super().__init__()
        self.gate_up = Projection(shape.dim, 2 * shape.hidden)
        self.down = Projection(shape.hidden, shape.dim, gain)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        gain = (2 * shape.layers) ** -0.5  # keeps the residual stream's variance independent of depth
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.attention = Attention(shape, gain)
        self.mlp_norm = nn.RMSNorm(shape.dim)
        self.mlp = SwiGLU(shape, gain)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes in; the mean loss out where targets are given, the logits where they are not."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.heads
        self.embedding = ByteEmbedding(VOCAB, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        cos, sin = rotary_angles(tokens.shape[1], self.head_dim, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        if targets is None:
            return logits
        # The loss is computed here, not in training_step, so that it is compiled with the rest.
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, temperature: float, seed: int, show: Callable[[bytes], None] | None = None
    ) -> bytes:
        """Continues `prompt` to `length` bytes; a temperature of 0 is greedy. `show` gets each byte as it is generated.

        Where weights are sharded, every forward gathers them, so every rank must call this. The number of forwards
        depends on the arguments alone, never on what is sampled, and one padded shape serves them all: attention is
        causal, so what stands to the right of a position does not reach it, and nothing is compiled twice.
        """
        device = self.embedding.weight.device
        source = torch.Generator().manual_seed(seed)
        tokens = torch.zeros(1, length, dtype=torch.long, device=device)
        tokens[0, : len(prompt)] = torch.tensor(list(prompt), device=device)
        for position in range(len(prompt), length):
            logits = self(tokens)[0, position - 1].float().cpu()
            if temperature > 0:
                tokens[0, position] = torch.multinomial((logits / temperature).softmax(0), 1, generator=source)
            else:
                tokens[0, position] = logits.argmax()
            if show is not None:
                show(bytes([int(tokens[0, position])]))
        return bytes(tokens[0].tolist())


class LitGPT(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows how it is sharded."""

    def __init__(
        self,
        size: str = "tiny",
        lr: float = 2e-3,
        warmup: int = 20,
        steps: int = 200,
        weight_decay: float = 0.1,
        fused: bool = True,
        compile_model: bool = False,
        mean_train_loss: bool = True,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.val_bits = MeanMetric()
        self.model: GPT | None = None

    def configure_model(self) -> None:
        # Built here and not in __init__, so that a strategy may build it on the meta device. Called once per stage.
        if self.model is not None:
            return
        self.model = GPT(SHAPES[self.hparams.size])
        if self.hparams.compile_model:
            self.model.compile()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(*batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=self.hparams.mean_train_loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = self.model(*batch)
        self.val_bits.update(loss / math.log(2))
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_bits_per_byte", self.val_bits)

    def configure_optimizers(self) -> dict:
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        plain = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": self.hparams.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        fused = self.hparams.fused and self.trainer.strategy.root_device.type == "cuda"
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95), fused=fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        warmup, steps = self.hparams.warmup, self.hparams.steps
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
