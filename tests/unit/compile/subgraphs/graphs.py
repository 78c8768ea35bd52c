"""Graphs of equal layers after our passes, with our ops at other positions in each layer."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from lightning_zero.compat.tensors import wait_tensor
from tests.unit.compile.graphs import Builder, aten

WIDTH = 16


def layers(count: int, at: int = 0, grads: bool = False) -> Graph:
    """x = relu(x @ w + b) * x of `count` layers, whose weights are gathered two layers at a time.

    Args:
        count: number of layers.
        at: node of a layer before which a group is launched, so that layers differ in the positions of our ops.
        grads: enqueue x after each product, as a backward does with gradients.
    """
    b = Builder()
    shards = [b.shard(f"w{i}", WIDTH * WIDTH // 2) for i in range(count)]
    bias = b.input("bias", WIDTH)
    x = b.input("x", 4, WIDTH)
    ready: dict[int, Node] = {}
    for i in range(count):
        steps = 0

        def maybe_start(i: int = i) -> None:
            nonlocal steps
            first = i + 1 if i % 2 else 0
            if (i % 2 and steps == at and first < count) or (i == 0 and steps == 0):
                _start(b, shards[first : first + 2], first, ready)
            steps += 1

        maybe_start()
        weight = ready[i]
        product = b.call(aten.mm.default, x, weight)
        maybe_start()
        if grads:
            handed = b.graph.call_function(torch.ops.lightning_zero.reduce_add.default, (product, shards[i]))
            handed.meta["val"] = None
        biased = b.call(aten.add.Tensor, product, bias)
        maybe_start()
        active = b.call(aten.relu.default, biased)
        x = b.call(aten.mul.Tensor, active, x)
        x = b.call(aten.sub.Tensor, x, active)
        x = b.call(aten.neg.default, x)
    return b.done(x)


def _start(b: Builder, shards: list[Node], first: int, ready: dict[int, Node]) -> None:
    start = b.graph.call_function(
        torch.ops.lightning_zero.gather_group.default, (shards, torch.float32, WIDTH * WIDTH * len(shards))
    )
    start.meta["val"] = torch.empty(WIDTH * WIDTH * len(shards), device="meta")
    waited = b.graph.call_function(wait_tensor, (start,))
    waited.meta["val"] = start.meta["val"]
    for number in range(len(shards)):
        begin = number * WIDTH * WIDTH
        flat = b.call(aten.slice.Tensor, waited, 0, begin, begin + WIDTH * WIDTH)
        ready[first + number] = b.call(aten.view.default, flat, [WIDTH, WIDTH])
