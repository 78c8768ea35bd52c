"""Work on a graph grows linearly with its layers: counts executed lines of our code."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

import lightning_zero
from lightning_zero.compile.context import PassContext
from lightning_zero.compile.fx_utils import WEIGHT
from lightning_zero.compile.partitioner.partition import tag_gathers
from lightning_zero.compile.passes import default_passes, run_passes, saved_limits
from lightning_zero.compile.subgraphs import Subgraph, SubgraphCache, cut, is_worth_cutting
from lightning_zero.compile.subgraphs.compile_subgraphs import _fingerprint
from lightning_zero.compile.subgraphs.subgraph_program import SubgraphProgram
from lightning_zero.config import CompileConfig
from tests.unit.compile.graphs import Builder, aten

OURS = str(Path(lightning_zero.__file__).parent)
WIDTH = 16
FEW, MANY = 12, 48


def model(count: int, backward: bool) -> Graph:
    """Layers of a product, a bias and a norm's scale with a weight each; in a backward, with gradients."""
    b = Builder()
    shards = [[b.shard(f"primals_{i}{kind}", WIDTH * WIDTH // 2) for kind in "wo"] for i in range(count)]
    x = b.input("tangents_1" if backward else "x", WIDTH, WIDTH)
    grads: list[Node | None] = []
    for i, own in enumerate(shards):
        for kind, shard in zip("wo", own, strict=True):
            weight = b.gather(shard, WIDTH, WIDTH)
            weight.meta["custom"] = {WEIGHT: f"layers.{i}.{kind}"}
            product = b.call(aten.mm.default, x, weight)
            x = b.call(aten.add.Tensor, b.call(aten.relu.default, product), b.call(aten.neg.default, x))
            if backward:
                grads.append(b.reduce(b.call(aten.mm.default, product, x), shard))
                grads[-1].meta["custom"] = {WEIGHT: f"layers.{i}.{kind}"}
    return b.done(x, *grads)


def counted(work: Callable[[], Any]) -> Counter[str]:
    """Return executed lines of each of our files."""
    lines: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(OURS):
            return None
        lines[file.removeprefix(OURS)] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def compile_passes(graph: Graph, options: dict[str, Any]) -> None:
    context = PassContext(
        CompileConfig(gather_group_mb=0.002, reduce_group_mb=0.002, **options), 2, zero_copy_gradients=True
    )
    tag_gathers(graph, saved_limits(context))
    is_worth_cutting(graph)
    run_passes(graph, default_passes(context), check_each=False)
    module = GraphModule(torch.nn.Module(), graph)
    steps = cut(graph)
    assert steps is not None
    pieces = [step for step in steps if isinstance(step, Subgraph)]
    assert len(pieces) > 4
    number = SubgraphCache().number
    for piece in pieces:
        _fingerprint(module, piece, {}, number)
    SubgraphProgram(module, steps, [lambda inputs: None for _ in pieces])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("options", [{}, {"unsharded_cache_mb": float("inf")}], ids=["gathered", "kept"])
@pytest.mark.exhaustive_variants("gathered-True", "kept-False")
def test_four_times_the_layers_are_four_times_the_work(backward: bool, options: dict[str, Any]) -> None:
    few, many = (counted(partial(compile_passes, model(count, backward), options)) for count in (FEW, MANY))
    growth = {file: many[file] / lines for file, lines in few.items() if many[file] > 500}
    assert growth, "nothing was counted"
    assert max(growth.values()) < 1.1 * MANY / FEW, growth
