"""Make joint graphs of linear layers, whose products may be converted to fp8."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.fx_utils import WEIGHT
from lightning_zero.sharding.weight_format import DEQUANTIZE, WeightKind, packed_words
from tests.unit.compile.graphs import Builder, aten

BF16 = torch.bfloat16
cast = torch.ops.prims.convert_element_type.default


class Layers:
    """A joint graph of linear layers, one after the other."""

    def __init__(self, tokens: int, width: int, dtype: torch.dtype = BF16) -> None:
        self.builder, self.tokens = Builder(), tokens
        self.x: Node = self.builder.input("x", tokens, width, dtype=dtype)
        self.dtype = dtype
        self._back: list[tuple[Node, Node, Node]] = []
        self._gathered: dict[str, tuple[Node, Node]] = {}

    def pack(self, name: str, rows: int, columns: int, kind: WeightKind) -> Layers:
        """Make a weight a frozen one, which is gathered packed."""
        b, words = self.builder, packed_words(rows, columns, kind)
        shard = b.shard(name, words, dtype=torch.int32)
        codes = b.gather(shard, words)
        codes.meta["custom"] = {WEIGHT: f"net.{name}"}
        self._gathered[name] = shard, b.call(DEQUANTIZE, codes, [rows, columns], self.dtype, kind)
        return self

    def weight(self, name: str, rows: int, columns: int) -> tuple[Node, Node]:
        if name not in self._gathered:
            b = self.builder
            shard = b.shard(name, rows * columns)
            whole = b.gather(shard, rows, columns)
            whole.meta["custom"] = {WEIGHT: f"net.{name}"}
            self._gathered[name] = shard, whole if self.dtype is torch.float32 else b.call(cast, whole, self.dtype)
        return self._gathered[name]

    def linear(self, name: str, outputs: int) -> Layers:
        b, x = self.builder, self.x
        shard, weight = self.weight(name, outputs, x.meta["val"].shape[1])
        self._back.append((shard, weight, x))
        self.x = b.call(aten.relu.default, b.call(aten.mm.default, x, b.call(aten.t.default, weight)))
        return self

    def done(self) -> Graph:
        b, y = self.builder, self.x
        dy, reduced = b.input("tangents_1", *y.meta["val"].shape, dtype=self.dtype), []
        for shard, weight, x in reversed(self._back):
            if shard.meta["val"].dtype is torch.int32:
                dy = b.call(aten.mm.default, dy, weight)
                continue
            gradient = b.call(cast, b.call(aten.mm.default, b.call(aten.t.default, dy), x), torch.float32)
            reduced.append(b.reduce(gradient, shard))
            reduced[-1].meta["custom"] = {WEIGHT: f"net.{shard.name}"}
            dy = b.call(aten.mm.default, dy, b.call(aten.t.default, b.call(aten.t.default, weight)))
        return b.done(y, dy, *reduced)


def called(graph: Graph, target: object) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=target))  # type: ignore[arg-type]
