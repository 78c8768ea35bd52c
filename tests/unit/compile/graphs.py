"""Small graphs for tests of passes, with values for shapes only, and the order of their ops as text."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.fx_utils import WEIGHT as WEIGHT_NAME
from lightning_zero.native import load

aten = torch.ops.aten

WEIGHT = 64 * 64 * 4  # bytes of each weight of the products below

NAMES = {
    "aten.slice.Tensor": "slice",
    "aten.view.default": "view",
    "_c10d_functional.wait_tensor.default": "wait",
}


class Builder:
    """Build a graph node by node; every node gets a meta tensor as its value."""

    def __init__(self) -> None:
        load()
        self.graph = Graph()

    def shard(self, name: str, numel: int = 32, dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(1, numel, dtype=dtype, device="meta")
        return node

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def call(self, op: torch._ops.OpOverload, *args: object, **kwargs: object) -> Node:
        node = self.graph.call_function(op, args, kwargs)
        values = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = op(*values[0], **values[1])
        return node

    def gather(self, shard: Node, *shape: int, dtype: torch.dtype | None = None) -> Node:
        dtype = dtype or shard.meta["val"].dtype
        node = self.graph.call_function(torch.ops.lightning_zero.gather.default, (shard, list(shape), dtype))
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def reduce(self, grad: Node, shard: Node) -> Node:
        node = self.graph.call_function(torch.ops.lightning_zero.reduce.default, (grad, shard))
        node.meta["val"] = torch.empty_like(shard.meta["val"])
        return node

    def done(self, *outputs: Node | None) -> Graph:
        self.graph.output(tuple(outputs))
        self.graph.lint()
        return self.graph


def products(shards: str, dtypes: dict[str, torch.dtype] | None = None, **sizes: int) -> Graph:
    """x @ a @ b @ ..., each weight gathered right before its product."""
    b = Builder()
    nodes = {name: b.shard(name, sizes.get(name, 2048)) for name in shards}
    x = b.input("x", 64, 64)
    for name in shards:
        whole = b.gather(nodes[name], 64, 64, dtype=(dtypes or {}).get(name))
        x = b.call(aten.mm.default, x, whole)
    return b.done(x)


def named_products(names: str = "abc", rows: int = 64, backward: bool = False) -> Graph:
    """x @ a @ b @ ...; in a backward, each weight also gets a gradient."""
    b = Builder()
    shards = {name: b.shard(f"primals_{name}", 2048) for name in names}
    x = b.input("tangents_1" if backward else "x", rows, 64)
    grads = []
    for name in names:
        whole = b.gather(shards[name], 64, 64)
        whole.meta["custom"] = {WEIGHT_NAME: f"layer.{name}"}
        x = b.call(aten.mm.default, x, whole)
        if backward:
            grads.append(b.reduce(b.call(aten.mm.default, b.call(aten.t.default, x), x), shards[name]))
            grads[-1].meta["custom"] = {WEIGHT_NAME: f"layer.{name}"}
    return b.done(x, *grads)


def order(graph: Graph) -> str:
    """Return the calls in order: ``gather_group(a, b) wait slice view mm ...``, with shards named."""
    words = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        short = NAMES.get(str(node.target)) or str(node.target).split(".")[1]
        if str(node.target).startswith("lightning_zero"):
            shards = [n.name for n in node.all_input_nodes if n.op == "placeholder"]
            short += f"({', '.join(shards)})"
        words.append(short)
    return " ".join(words)
