"""Graphs compiled by subgraphs with Inductor.

Each distinct one once, with the results of a whole graph.
"""

from __future__ import annotations

from operator import getitem
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import config as functorch_config
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_zero.compat.compiler import compile_fx_inner, lookup_backend
from lightning_zero.compile.subgraphs import DeferredKernels, SubgraphCache, cut, is_worth_cutting, lower_subgraphs
from lightning_zero.compile.subgraphs.compile_subgraphs import StrideMismatch, _fingerprint, check_strides, fix_strides
from lightning_zero.compile.subgraphs.subgraph import Subgraph
from lightning_zero.compile.subgraphs.subgraph_program import SubgraphProgram, compile_subgraph, subgraph_context

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
    """Return losses and gradients, with subgraphs in this cache or with whole graphs compiled for any length."""

    def inner(graph: GraphModule, inputs: Any, **settings: Any) -> Any:
        if cache is None:
            return compile_fx_inner(graph, inputs, **settings)
        assert is_worth_cutting(graph.graph)
        fix_strides(graph.graph, inputs)
        steps = cut(graph.graph)
        assert steps is not None
        kernels = DeferredKernels()
        program = lower_subgraphs(graph, cache, kernels, steps, **settings)
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
    with functorch_config.patch(enable_autograd_cache=False):  # its key ignores the cache of subgraphs
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
    trained(Layers(6), batches[:1], cache)  # as for another plan, and for more layers
    assert cache.compiled == compiled
    assert cache.found > found + 6


class Padded(Layers):
    """A product of this width is padded on GPUs, and saved for backward as users get it."""

    def __init__(self) -> None:
        super().__init__(3)
        self.head = nn.Linear(WIDTH, 1003, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for line in self.lines:
            x = nn.functional.silu(line(nn.functional.rms_norm(x, (WIDTH,))))
        logits = nn.functional.linear(x.bfloat16(), self.head.weight.bfloat16())
        return logits, logits.float().logsumexp(-1).mean()  # type: ignore[return-value]


@pytest.mark.exhaustive  # see the tests of strides below
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
            # Inputs of a subgraph have other indices: those of the whole graph would overwrite values that others still
            # read.
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
    """Return the key of a subgraph that calls a graph of its own, like attention with a user's score function."""
    called = Graph()
    called.output(called.call_function(torch.mul, (called.placeholder("x"), scale)))
    module, graph = nn.Module(), Graph()
    module.called = GraphModule(nn.Module(), called)
    x, body = graph.placeholder("x"), graph.create_node("get_attr", "called")
    call = graph.call_function(torch.cond, (x, body, body, [x]))
    return _fingerprint(module, Subgraph((x,), (body, call), (call,)), {}, cache.number)  # type: ignore[arg-type]


def test_what_calls_another_graph_is_never_taken_for_what_called_one_that_is_gone() -> None:
    cache = SubgraphCache()
    assert len({calling(cache, float(scale)) for scale in range(100)}) == 100  # addresses are reused much earlier


def test_symbols_of_graphs_that_are_gone_are_never_taken_for_those_of_another() -> None:
    cache = SubgraphCache()
    assert len({cache.number(ShapeEnv()) for _ in range(100)}) == 100
    kept = ShapeEnv()
    assert cache.number(kept) == cache.number(kept)


aten = torch.ops.aten
NARROW, WIDE = 13, 16


def padded(fake: FakeTensorMode) -> tuple[Graph, list[Tensor]]:
    """A product that was padded and cut again, with strides recorded before that for its readers."""
    with fake:
        given = [torch.empty(8, 5), torch.empty(5, WIDE)]
    graph = Graph()
    placeholders = [graph.placeholder(name) for name in "ab"]
    for node, value in zip(placeholders, given, strict=True):
        node.meta["val"] = value
    nodes: list[Node] = []

    def add(target: Any, *args: Any, stale: tuple[int, ...] = ()) -> Node:
        node = graph.call_function(target, args)
        values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
        node.meta["val"] = target(*values)
        if stale:
            with fake:
                node.meta["val"] = torch.empty(stale)
        nodes.append(node)
        return node

    narrow = add(aten.slice.Tensor, add(aten.mm.default, *placeholders), 1, 0, NARROW)
    split = add(aten.view.default, narrow, [4, 2, NARROW], stale=(4, 2, NARROW))
    row = add(aten.select.int, split, 0, 1, stale=(2, NARROW))
    made = add(aten.sin.default, split, stale=(4, 2, NARROW))
    flat = graph.call_function(aten.view.default, (narrow, [8 * NARROW]))  # a view before the product was padded
    with fake:
        flat.meta["val"] = torch.empty(8 * NARROW)
    graph.output((split, row, made, flat))
    return graph, given


def test_views_of_a_padded_product_are_noted_as_they_are() -> None:
    graph, given = padded(FakeTensorMode())
    fix_strides(graph, given)
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, tuple)
    split, row, made, flat = outputs
    assert split.meta["val"].stride() == (2 * WIDE, WIDE, 1)
    assert row.meta["val"].stride() == (WIDE, 1)
    assert made.meta["val"].stride() == (2 * NARROW, NARROW, 1)  # new memory has no gaps
    assert flat.target is aten.reshape.default, "nothing of that shape lies there"
    assert flat.meta["val"].stride() == (1,)


def test_inputs_have_the_strides_they_come_with() -> None:
    fake = FakeTensorMode()
    graph, given = padded(fake)
    with fake:
        given[0] = torch.empty(5, 8).t()
    fix_strides(graph, given)
    assert next(iter(graph.nodes)).meta["val"].stride() == (1, 8)


def test_what_forward_hands_to_backward_is_told_as_it_is_and_comes_as_told() -> None:
    fake = FakeTensorMode()
    graph, given = padded(fake)
    fix_strides(graph, given)
    inputs = tuple(graph.find_nodes(op="placeholder"))
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, tuple)
    compiled = compile_subgraph(GraphModule({}, graph), given, {"is_backward": False})
    check_strides(compiled, [node.meta["val"] for node in outputs])
    context = TracingContext(None)
    context.output_strides = []
    with tracing(context):
        program = SubgraphProgram(GraphModule({}, graph), [Subgraph(inputs, (), outputs)], [compiled])
    told = [(2 * WIDE, WIDE, 1), (WIDE, 1), (2 * NARROW, NARROW, 1), (1,)]
    assert context.output_strides == told
    a, b = torch.randn(8, 5), torch.randn(5, WIDE)
    results = program([a, b])
    assert [result.stride() for result in results] == told
    torch.testing.assert_close(results[0], (a @ b)[:, :NARROW].reshape(4, 2, NARROW))


def test_a_piece_whose_results_lie_otherwise_is_not_used() -> None:
    value = torch.empty(4, 1, 3)
    check_strides(
        SimpleNamespace(output_strides=[("3", "99", "1")]), [value]
    )  # nothing follows a stride of one element
    check_strides(SimpleNamespace(output_strides=[("3*s0", "3", "1")]), [value])
    check_strides(SimpleNamespace(output_strides=None), [value])
    with pytest.raises(StrideMismatch):
        check_strides(SimpleNamespace(output_strides=[("8*s0", "3", "2")]), [value])
    with pytest.raises(StrideMismatch, match=r"\['8', '1'\].*\['3', '1'\]"):
        check_strides(SimpleNamespace(output_strides=[("8", "3", "1")]), [value])


def test_equal_views_of_equal_layers_are_each_noted_as_they_are() -> None:
    fake = FakeTensorMode()
    with fake:
        value, other = torch.empty(4, 6), torch.empty(4, 6)
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value
    views = [graph.call_function(aten.t.default, (x,)) for _ in range(3)]
    split = graph.call_function(aten.split.Tensor, (x, 2, 1))
    parts = [graph.call_function(getitem, (split, at)) for at in range(3)]
    graph.output((*views, *parts))
    for node in views:
        node.meta["val"] = value.t()
    views[1].meta["val"] = other.t().contiguous()  # recorded incorrectly between two correct ones
    split.meta["val"] = value.split(2, 1)
    for at, node in enumerate(parts):
        node.meta["val"] = split.meta["val"][at] if at != 1 else other[:, :2].contiguous()
    fix_strides(graph, [value])
    assert [node.meta["val"].stride() for node in views] == [(1, 6)] * 3
    assert [node.meta["val"].stride() for node in parts] == [(6, 1)] * 3
