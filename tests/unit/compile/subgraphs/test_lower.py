"""Graphs compiled by pieces, with Inductor itself: equal pieces once, and the results of a graph that stays whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_zero.compat.compiler import compile_fx_inner, functorch_config, lookup_backend
from lightning_zero.compile.subgraphs import DeferredKernels, SubgraphCache, cut, fix_strides, is_worth_cutting, lower
from lightning_zero.compile.subgraphs.compile_subgraphs import _fingerprint
from lightning_zero.compile.subgraphs.subgraph import Subgraph
from lightning_zero.compile.subgraphs.subgraph_program import subgraph_context

WIDTH = 8


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for line in self.lines:
            x = nn.functional.rms_norm(x, (WIDTH,))
            x = x + nn.functional.dropout(nn.functional.silu(line(x)), 0.2, self.training)
        return x.square().mean()


def trained(module: nn.Module, batches: list[Tensor], cache: SubgraphCache | None) -> tuple[list[float], Tensor]:
    """Losses, and all gradients, with pieces in this cache, or with whole graphs, which are compiled for any length."""

    def inner(graph: GraphModule, inputs: Any, **settings: Any) -> Any:
        if cache is None:
            return compile_fx_inner(graph, inputs, **settings)
        assert is_worth_cutting(graph.graph)
        fix_strides(graph.graph, inputs)
        steps = cut(graph.graph)
        assert steps is not None
        kernels = DeferredKernels()
        program = lower(graph, cache, kernels, steps, **settings)
        kernels.finish()
        return program

    compile_fx: Any = lookup_backend("inductor")
    torch.compiler.reset()
    torch.manual_seed(0)
    module.zero_grad()
    run = torch.compile(
        module,
        backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner),
        dynamic=True if cache is None else None,
    )
    losses = []
    with functorch_config.patch(enable_autograd_cache=False):  # it takes no notice of what compiles
        for batch in batches:
            results = run(batch)
            loss = results[1] if isinstance(results, tuple) else results
            loss.backward()
            losses.append(loss.item())
    return losses, torch.cat([param.grad.flatten() for param in module.parameters() if param.grad is not None])


@pytest.mark.slow
@pytest.mark.exhaustive_variants("two lengths")
@pytest.mark.parametrize("lengths", [(70,), (70, 50)], ids=["one length", "two lengths"])
def test_pieces_are_compiled_once_and_do_what_the_whole_does(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(rows, WIDTH) for rows in lengths]  # the second length makes sizes dynamic
    module, cache = Layers(3), SubgraphCache()
    by_pieces = trained(module, batches, cache)
    assert by_pieces[1].norm() > 0
    whole = trained(module, batches, None)
    assert by_pieces[0] == pytest.approx(whole[0], rel=1e-6)
    torch.testing.assert_close(by_pieces[1], whole[1], rtol=1e-5, atol=1e-7)
    compiled, found = cache.compiled, cache.found
    assert found > 0
    trained(Layers(6), batches[:1], cache)  # as for another plan, and of more layers
    assert cache.compiled == compiled
    assert cache.found > found + 6


class Padded(Layers):
    """Its product with so many columns is padded on GPUs, and saved for backward as users get it."""

    def __init__(self) -> None:
        super().__init__(3)
        self.head = nn.Linear(WIDTH, 1003, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for line in self.lines:
            x = nn.functional.silu(line(nn.functional.rms_norm(x, (WIDTH,))))
        logits = nn.functional.linear(x.bfloat16(), self.head.weight.bfloat16())
        return logits, logits.float().logsumexp(-1).mean()  # type: ignore[return-value]


@pytest.mark.exhaustive  # see test_strides.py
def test_backward_gets_a_padded_product_of_any_length_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_device", "has_triton"):
        monkeypatch.setattr(f"torch._inductor.fx_passes.pad_mm.{name}", lambda *_: True)
    torch.manual_seed(0)
    module, batches = Padded(), [torch.randn(4, length, WIDTH) for length in (40, 32)]
    losses = [module(batch)[1] for batch in batches]
    expected = torch.autograd.grad(torch.stack(losses).sum(), list(module.parameters()))
    with inductor_config.patch(force_shape_pad=True, shape_padding=True):
        found, gradients = trained(module, batches, SubgraphCache())
    assert found == pytest.approx([loss.item() for loss in losses], rel=1e-5)
    torch.testing.assert_close(gradients, torch.cat([grad.flatten() for grad in expected]), rtol=2e-2, atol=1e-5)


def test_inductor_does_not_take_a_piece_for_the_whole_graph() -> None:
    context = TracingContext(None)
    context.output_strides = [(1,)]
    context.fw_metadata = metadata = type("Metadata", (), {"bw_donated_idxs": [0, 1]})()
    with tracing(context), inductor_config.patch(post_grad_custom_post_pass=len):
        with subgraph_context():
            # Its inputs bear other numbers: those of the whole graph would let it overwrite what others still read.
            assert metadata.bw_donated_idxs is None
            assert context.output_strides is None
            assert inductor_config.post_grad_custom_post_pass is None
        assert metadata.bw_donated_idxs == [0, 1]
        assert context.output_strides == [(1,)]


def subgraph(name: str, scale: float = 2.0, rows: int = 3, dtype: torch.dtype = torch.float32, results: int = 1) -> str:
    graph = Graph()
    x = graph.placeholder(name)
    x.meta["val"] = torch.empty(rows, 2, dtype=dtype, device="meta")
    y = graph.call_function(torch.ops.aten.mul.Tensor, (x, scale))
    y.meta["val"] = x.meta["val"]
    made = Subgraph((x,), (y,), (y,) * results)
    return _fingerprint(GraphModule(nn.Module(), graph), made, {"is_backward": False}, SubgraphCache().number)


def test_pieces_are_equal_by_what_they_do() -> None:
    assert subgraph("x") == subgraph("another_name")
    others = {subgraph("x"), subgraph("x", scale=3.0), subgraph("x", rows=4), subgraph("x", dtype=torch.bfloat16)}
    assert len(others | {subgraph("x", results=0), subgraph("x", results=2)}) == 6


def with_generator() -> str:
    graph = Graph()
    state = graph.placeholder("state")
    state.meta["val"] = torch.Generator()
    graph.output(())
    made = Subgraph((state,), (), ())
    return _fingerprint(GraphModule(nn.Module(), graph), made, {"is_backward": False}, SubgraphCache().number)


def test_generators_are_equal_wherever_they_lie_in_memory() -> None:
    assert with_generator() == with_generator()


def calling(cache: SubgraphCache, scale: float) -> str:
    """Of a piece that calls a graph of its own, as attention with a score of the user's does."""
    called = Graph()
    called.output(called.call_function(torch.mul, (called.placeholder("x"), scale)))
    module, graph = nn.Module(), Graph()
    module.called = GraphModule(nn.Module(), called)
    x, body = graph.placeholder("x"), graph.create_node("get_attr", "called")
    call = graph.call_function(torch.cond, (x, body, body, [x]))
    return _fingerprint(module, Subgraph((x,), (body, call), (call,)), {}, cache.number)  # type: ignore[arg-type]


def test_what_calls_another_graph_is_never_taken_for_what_called_one_that_is_gone() -> None:
    cache = SubgraphCache()
    assert len({calling(cache, float(scale)) for scale in range(100)}) == 100  # addresses come again much earlier


def test_symbols_of_graphs_that_are_gone_are_never_taken_for_those_of_another() -> None:
    cache = SubgraphCache()
    assert len({cache.number(ShapeEnv()) for _ in range(100)}) == 100
    kept = ShapeEnv()
    assert cache.number(kept) == cache.number(kept)
