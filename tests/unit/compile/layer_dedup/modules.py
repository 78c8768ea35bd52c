"""Modules of equal layers that cover special cases of deduplication, and texts of their graphs."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from functorch.compile import min_cut_rematerialization_partition as min_cut_partition
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

from lightning_zero.compat.compiler import aot_autograd
from lightning_zero.compat.dynamo import mark_dynamic
from lightning_zero.compat.graphs import (
    AC_GRAPH_ID,
    CUSTOM,
    FWD_NN_MODULE_STACK,
    NN_MODULE_STACK,
    PARTITIONER_TAG,
    RECOMPUTE,
)
from lightning_zero.compile.layer_dedup import DedupFailed, LayerDedup, dedup_layers, joint_tracer

WIDTH = 8
LAYERS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        wide = F.gelu(self.wide(self.norm(x)))
        return x + F.dropout(self.narrow(wide), 0.3, self.training)


class Attending(Block):
    """Layers share an input that requires grad, and use several views of one product."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        query, key = self.wide(self.norm(x)).unflatten(-1, (2, 2, WIDTH // 2)).unbind(-3)
        heads = F.scaled_dot_product_attention(
            query.transpose(-2, -3), key.transpose(-2, -3), x[..., None, :, :4], given[0]
        )
        return x + heads.transpose(-2, -3).flatten(-2)


class InPlace(Block):
    """Mutate own values, and read inputs in another layout."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        wide = self.wide(x.transpose(-1, -2).contiguous().transpose(-1, -2))
        wide[..., :2].mul_(2.0)
        return torch.relu_(self.narrow(wide)) + x


class Batched(Block):
    """Mutate buffers, which are inputs of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return x + self.batch(self.narrow(F.silu(self.wide(x))).flatten(0, 1)).view_as(x)


class Twice(Block):
    """Read the shared input in two places."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return x + self.narrow(F.silu(self.wide(given[0] @ x))) * given[0].mean(1, keepdim=True)


class Caching(Block):
    """Return views of one product to the caller, as decoders return keys and values."""

    def forward(self, x: Tensor, *given: Tensor) -> Any:
        keys = self.wide(self.norm(x)).unflatten(-1, (2, 2, WIDTH // 2)).transpose(1, 2)[..., 0, :]
        return x + self.narrow(F.gelu(self.wide(x))), keys


class Windowed(Block):
    """Return values independent of the layer's inputs and without grad (window length of transformers' caches), read a
    constant of the code, write to a part of an own value, and call an op without effect."""

    def __init__(self) -> None:
        super().__init__()
        self.window = torch.tensor([3])

    def forward(self, x: Tensor, *given: Tensor) -> Any:
        torch._C._log_api_usage_once("tests.dedup_layers")
        length = self.window.to(torch.float64) + 1
        scale = torch.tensor([0.5, 2.0], dtype=x.dtype).repeat(WIDTH // 2)
        order = torch.arange(WIDTH).flip(0)
        order[:2] = torch.arange(2)
        return x + self.narrow(F.gelu(self.wide(x)))[..., order] * scale, length.mul(2)


class Masking(Block):
    """Draw random numbers, also by a function of another name."""

    def forward(self, x: Tensor, *given: Tensor) -> Any:
        own = F.dropout(self.narrow(F.gelu(self.wide(x))), 0.3)
        mask = F.dropout1d(torch.ones(*x.shape[:2], 1), 0.5)
        return x + F.dropout(own * mask, 0.3), mask


class Cached(nn.Module):
    def __init__(self, block: type[Block] = Caching) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        keys = []
        for layer in self.layers:
            x, key = layer(x)
            keys.append(key)
        return x.square().sum(), keys


class Stack(nn.Module):
    def __init__(self, block: type[Block], last: Callable[[Tensor], Tensor] = torch.square) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(6, 6))
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.inner(x), self.bias.tanh()
        for layer in self.layers:
            x = layer(x, bias)
        return self.last(x).sum()


class Counting(Stack):
    """Mutate values that all layers have read and no backward needs."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(Block)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.inner(x), self.bias.tanh()
        for layer in self.layers:
            x = layer(x, bias) + self.count
        self.count.add_(1)
        return self.last(x).sum()


class Frozen(Stack):
    """The first two layers are one kind, which is too few; one of the others is partly frozen."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.layers[0].requires_grad_(False)
        self.layers.extend([Block() for _ in range(2)])
        self.layers[5].wide.requires_grad_(False)


class Tied(Stack):
    """One layer, called repeatedly."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.layers = nn.ModuleList([self.layers[0]] * LAYERS)


class Mixing(Block):
    """View memory as another dtype, and call an op that returns a tensor and None."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        mixed = torch.view_as_real(torch.fft.fft(x))[..., 0]
        return x + self.heads(mixed, mixed, mixed, need_weights=False)[0]


class Curve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.power = power
        return x.tanh() * power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (1 - x.tanh().square()) * ctx.power * grad, None


class Bending(Block):
    """Call a custom autograd function."""

    def __init__(self, power: float = 2.0) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return x + self.narrow(Curve.apply(self.wide(x), self.power))


class Bent(Stack):
    """Two of the functions differ only in their code."""

    def __init__(self) -> None:
        super().__init__(Bending)
        self.layers.extend([Bending(3.0), Bending(4.0)])


class Permuted(Stack):
    """Layers return channels-last values and get gradients in default strides."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).mT.contiguous().mT
        for layer in self.layers:
            x = layer(x)
        return F.layer_norm(x, (WIDTH,)).square().sum()


class Turned(Stack):
    """Only the last layer gets a gradient in other strides than its result."""

    def __init__(self) -> None:
        super().__init__(Normed)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return F.layer_norm(x.mT, (6,)).square().sum()


class Normed(Block):
    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return self.norm(F.gelu(self.narrow(F.silu(self.wide(x)))))


class Projecting(nn.Module):
    """The equal parts are a small share."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = x.sin().neg().exp().tanh().cos()
        for number in range(40 * LAYERS):
            x = x * (number + 0.5)
        return x.sum()


def joint_graph(
    module: nn.Module, outlined: bool, precision: torch.dtype = torch.float32, dynamic: bool = False
) -> tuple[list[str], int]:
    """Return the lines of the graph, and the number of deduplicated layers in it."""
    lines: list[str] = []
    count = 0
    torch.compiler.reset()
    torch.manual_seed(0)
    x = torch.randn(3, 6, WIDTH)
    for dim in (0, 1) if dynamic else ():
        mark_dynamic(x, dim)

    def found(layers: LayerDedup | None, graph: Graph) -> None:
        nonlocal count
        count = 0 if layers is None else len(layers)
        lines[:] = described(graph)

    with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
        torch.compile(module, backend=backend(outlined, found))(x)
    return lines, count


def same_graph(module: nn.Module, count: int, dynamic: bool = False) -> list[str]:
    """Assert that the joint graph with ``count`` deduplicated layers equals the whole one, and return it."""
    whole, _ = joint_graph(module, False, dynamic=dynamic)
    once, found = joint_graph(module, True, dynamic=dynamic)
    assert found == count
    assert len(whole) > 100
    assert once == whole, "\n".join(difflib.unified_diff(whole, once, "whole", "once", lineterm=""))
    return whole


def backend(outlined: bool, found: Callable[[LayerDedup | None, Graph], None] = lambda *_: None) -> Callable[..., Any]:
    """Return a backend that calls ``found`` with the deduplicated layers and the expanded joint graph."""

    def compile_graph(graph: GraphModule, inputs: Any) -> Any:
        layers = dedup_layers(graph, joint_tracer("aot_eager")) if outlined else None

        def compiled(layers: LayerDedup | None) -> Any:
            def partition(joint: GraphModule, *args: Any, **settings: Any) -> Any:
                if layers is not None:
                    layers.expand(joint.graph)
                joint.graph.lint()
                found(layers, joint.graph)
                return min_cut_partition(joint, *args, **settings)

            def compiler(half: GraphModule, inputs: Any) -> Any:
                return make_boxed_func(half)

            return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(graph, inputs)

        while layers is not None:
            try:
                return compiled(layers)
            except DedupFailed as error:
                layers = layers.without(error)
        return compiled(None)

    return compile_graph


def described(graph: Graph) -> list[str]:
    """Return lines with all that passes depend on: calls, arguments, storages of results and modules.

    Nodes are named by their computation, independent of their position.
    """
    names: dict[Any, str] = {}
    memory: dict[int, str] = {}
    lines: list[str] = []
    regions = sorted({node.meta[AC_GRAPH_ID] for node in graph.nodes if AC_GRAPH_ID in node.meta})

    def value(found: Any, name: str) -> str:
        if isinstance(found, Tensor):
            owner = memory.setdefault(found.untyped_storage()._cdata, name)
            return f"{found.dtype}{tuple(found.shape)}{found.stride()}{found.storage_offset()} of {owner}"
        return str([value(part, name) for part in found]) if isinstance(found, list | tuple) else repr(found)

    for node in graph.nodes:
        called = node.name if node.op == "placeholder" else node.target
        name = f"{called} {map_arg((node.args, node.kwargs), lambda read: names[read])}"
        names[node] = hashlib.sha256(name.encode()).hexdigest()[:8]
        modules = [
            [path for path, _ in (node.meta.get(key) or {}).values()] for key in (NN_MODULE_STACK, FWD_NN_MODULE_STACK)
        ]
        again = [regions.index(node.meta[AC_GRAPH_ID]), str(node.meta[RECOMPUTE])] if AC_GRAPH_ID in node.meta else []
        meta = f"{modules} {node.meta.get(CUSTOM)} {node.meta.get(PARTITIONER_TAG)} {again} {sorted(node.meta)}"
        lines.append(re.sub("0x[0-9a-f]+", "", f"{name} {value(node.meta.get('val'), names[node])} {meta}"))
    return lines
