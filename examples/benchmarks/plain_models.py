"""Models in plain torch, written as most people write them: a U-Net, a diffusion transformer, a graph network."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DiffusionTransformer", "GraphNet", "UNet"]


class StepEmbedding(nn.Module):
    """Embed a diffusion step of shape [N] as [N, width], in the dtype of the images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frequencies = width // 2
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, step: Tensor, dtype: torch.dtype) -> Tensor:
        exponents = torch.arange(self.frequencies, device=step.device) / self.frequencies
        angles = step[:, None].float() * torch.exp(-math.log(10000.0) * exponents)
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype))


class ResidualBlock(nn.Module):
    """Two convolutions, with the embedded step added between them, and attention if it is wanted."""

    def __init__(self, inputs: int, outputs: int, width: int, attention: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.step = nn.Linear(width, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.norm3 = nn.GroupNorm(8, outputs) if attention else None
        self.attention = nn.MultiheadAttention(outputs, outputs // 32, batch_first=True) if attention else None

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.step(F.silu(step))[:, :, None, None]
        x = self.skip(x) + self.conv2(F.silu(self.norm2(h)))
        if self.attention is not None and self.norm3 is not None:
            flat = self.norm3(x).flatten(2).transpose(1, 2)
            mixed, _ = self.attention(flat, flat, flat, need_weights=False)
            x = x + mixed.transpose(1, 2).view_as(x)
        return x


class UNet(nn.Module):
    """Predict the noise of images [N, C, H, W], with attention at the two lowest resolutions."""

    def __init__(self, width: int, levels: int, blocks: int, channels: int = 3) -> None:
        super().__init__()
        widths = [width * min(2**level, 4) for level in range(levels)]
        self.step = StepEmbedding(4 * width)
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        skipped, current = [width], width
        for level, wide in enumerate(widths):
            for _ in range(blocks):
                self.down.append(ResidualBlock(current, wide, 4 * width, level >= levels - 2))
                current = wide
                skipped.append(current)
            if level < levels - 1:
                self.shrink.append(nn.Conv2d(current, current, 3, stride=2, padding=1))
                skipped.append(current)
        self.middle = ResidualBlock(current, current, 4 * width, True)
        for level, wide in reversed(list(enumerate(widths))):
            for _ in range(blocks + 1):
                self.up.append(ResidualBlock(current + skipped.pop(), wide, 4 * width, level >= levels - 2))
                current = wide
            if level:
                self.grow.append(nn.Conv2d(current, current, 3, padding=1))
        self.blocks = blocks
        self.last = nn.Sequential(nn.GroupNorm(8, current), nn.SiLU(), nn.Conv2d(current, channels, 3, padding=1))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        embedded = self.step(step, x.dtype)
        x = self.first(x)
        skipped = [x]
        for number, block in enumerate(self.down):
            x = block(x, embedded)
            skipped.append(x)
            level, place = divmod(number, self.blocks)
            if place == self.blocks - 1 and level < len(self.shrink):
                x = self.shrink[level](x)
                skipped.append(x)
        x = self.middle(x, embedded)
        for number, block in enumerate(self.up):
            x = block(torch.cat([x, skipped.pop()], dim=1), embedded)
            level, place = divmod(number, self.blocks + 1)
            if place == self.blocks and level < len(self.grow):
                x = self.grow[level](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.last(x)


class DiffusionBlock(nn.Module):
    """Attention and an MLP, whose norms are shifted and scaled by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(condition)[:, None].chunk(6, dim=-1)
        qkv = self.qkv(self.norm1(x) * (1 + scale1) + shift1).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(mixed)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    """Predict the noise of latents [N, 4, H, W] of labelled images, as DiT does."""

    def __init__(self, width: int, layers: int, heads: int, pixels: int, labels: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, (pixels // 2) ** 2, width) * 0.02)
        self.step, self.label = StepEmbedding(width), nn.Embedding(labels, width)
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads) for _ in range(layers))
        self.norm, self.last = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 16)

    def forward(self, x: Tensor, step: Tensor, label: Tensor) -> Tensor:
        n, _, height, width = x.shape
        condition = self.step(step, x.dtype) + self.label(label)
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            tokens = block(tokens, condition)
        patches = self.last(self.norm(tokens)).view(n, height // 2, width // 2, 2, 2, 4)
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(n, 4, height, width)


class MessagePassing(nn.Module):
    """Send a message along each edge, and average what arrives at each node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.message = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.update = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.norm(x)
        messages = self.message(torch.cat([h[source], h[target]], dim=-1))
        total = torch.zeros_like(h).index_add(0, target, messages.to(h.dtype))
        count = torch.zeros(len(h), 1, dtype=h.dtype, device=h.device).index_add(
            0, target, torch.ones(len(target), 1, dtype=h.dtype, device=h.device)
        )
        return x + self.update(torch.cat([h, total / count.clamp(min=1)], dim=-1))


class GraphNet(nn.Module):
    """Classify graphs that are joined to one: nodes [N, inputs], edges [2, E], and the graph of each node [N]."""

    def __init__(self, width: int, layers: int, inputs: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(MessagePassing(width) for _ in range(layers))
        self.last = nn.Linear(width, classes)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor, graphs: int) -> Tensor:
        x = self.first(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        return self.last(torch.zeros(graphs, x.shape[1], dtype=x.dtype, device=x.device).index_add(0, graph, x))
