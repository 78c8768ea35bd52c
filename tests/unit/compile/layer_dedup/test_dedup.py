"""A joint graph with deduplicated layers equals, node by node, the one in which each layer was traced."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

from lightning_zero.compat.argument_checks import check_tensor_arguments
from lightning_zero.compile.layer_dedup import DedupFailed, LayerDedup
from lightning_zero.compile.layer_dedup.expand import LayerExpansion
from tests.unit.compile.layer_dedup.modules import (
    LAYERS,
    WIDTH,
    Attending,
    Batched,
    Bent,
    Block,
    Cached,
    Counting,
    Frozen,
    InPlace,
    Masking,
    Mixing,
    Permuted,
    Projecting,
    Stack,
    Tied,
    Turned,
    Twice,
    Windowed,
    backend,
    joint_graph,
    same_graph,
)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: Stack(Block), LAYERS),
        pytest.param(lambda: Stack(InPlace), LAYERS, marks=pytest.mark.slow),
        (lambda: Stack(Batched), 0),
        # Summands of the shared gradient would be added in another order.
        (lambda: Stack(Twice), 0),
        pytest.param(Frozen, LAYERS, marks=pytest.mark.slow),
        (lambda: Stack(Mixing), LAYERS),
        (Permuted, LAYERS),
        (Bent, LAYERS),
        # The last layer gets an expanded gradient.
        (lambda: Stack(Block, nn.Identity()), LAYERS - 1),
    ],
    ids=[
        "dropout",
        "edits of its own",
        "edits of buffers",
        "two parts of one gradient",
        "frozen in part",
        "other dtypes",
        "permuted",
        "functions with derivatives",
        "expanded gradient",
    ],
)
@pytest.mark.exhaustive_variants(
    "edits of its own", "frozen in part", "other dtypes", "functions with derivatives", "expanded gradient", "permuted"
)
def test_the_joint_graph_is_that_of_the_whole(make: Callable[[], nn.Module], count: int) -> None:
    same_graph(make(), count)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: Stack(Block), LAYERS),
        (lambda: Stack(Mixing), LAYERS),
        (Permuted, LAYERS),
        (lambda: Stack(Block, nn.Identity()), LAYERS - 1),
    ],
    ids=["plain", "several sizes in a product", "permuted", "expanded gradient"],
)
@pytest.mark.exhaustive_variants("permuted", "expanded gradient")
def test_the_joint_graph_with_symbolic_sizes_is_that_of_the_whole(make: Callable[[], nn.Module], count: int) -> None:
    lines = same_graph(make(), count, dynamic=True)
    assert any("s77" in line or "s0" in line for line in lines)


def test_groups_of_layers_are_one_kind_and_what_stands_between_them() -> None:
    """Sliding-window models have five layers with a window and one without, again and again."""
    module = Stack(Block)
    kinds: list[type[Block]] = [Block, Block, Block, Block, Mixing]
    module.layers = nn.ModuleList(kind() for kind in kinds * 2)
    same_graph(module, 8)


def test_a_layer_takes_no_longer_to_put_in_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch searches for unused names among nodes of equal number, and records a graph's outputs anew."""
    numbered: list[str] = []
    returned: list[Node] = []
    inlining: list[bool] = []
    inline, create, replace = LayerDedup.expand, Graph.create_node, Node.replace_all_uses_with

    def inlined(layers: LayerDedup, graph: Graph) -> Graph:
        inlining.append(True)
        try:
            return inline(layers, graph)
        finally:
            inlining.clear()

    def created(graph: Graph, op: str, target: Any, *args: Any, **kwargs: Any) -> Node:
        name = kwargs.get("name", args[2] if len(args) > 2 else None)
        if inlining and name is not None and name.rpartition("_")[2].isdecimal():
            numbered.append(name)
        return create(graph, op, target, *args, **kwargs)

    def replaced(node: Node, *args: Any, **kwargs: Any) -> list[Node]:
        users = replace(node, *args, **kwargs)
        returned.extend(user for user in users if inlining and user.op == "output")
        return users

    monkeypatch.setattr(LayerDedup, "expand", inlined)
    monkeypatch.setattr(Graph, "create_node", created)
    monkeypatch.setattr(Node, "replace_all_uses_with", replaced)
    _, count = joint_graph(Stack(Block), True)
    assert count == LAYERS
    assert not numbered
    assert not returned


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: Stack(Attending), Tied], ids=["a bias", "weights"])
@pytest.mark.exhaustive_variants("a bias")
def test_what_all_layers_read_gets_the_same_sum_of_gradients(make: Callable[[], nn.Module]) -> None:
    module = make()
    whole, _ = joint_graph(module, False)
    once, found = joint_graph(module, True)
    assert found == LAYERS
    assert sorted(once) == sorted(whole)  # each layer's summand is added after the layer, not inside it


@pytest.mark.slow
def test_what_autocast_casts_once_in_all_stays_in_one_graph() -> None:
    module = Stack(Block)
    assert joint_graph(module, True, torch.bfloat16)[1] == 0  # parameters without a gather in between


@pytest.mark.exhaustive  # see dynamo_layer_reuse/test_layer_calls.py for layers that differ
def test_layers_that_cannot_be_put_in_place_are_traced_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stack(Block)
    whole, _ = joint_graph(module, False)
    monkeypatch.setattr("lightning_zero.compile.layer_dedup.dedup.rebase_value", lambda value, moved: value.nothing)
    instead, found = joint_graph(module, True)
    assert found == 0
    assert instead == whole


def test_views_that_a_model_returns_of_each_layer_get_their_gradients() -> None:
    module, x = Cached(), torch.randn(3, 6, WIDTH)
    counts: list[int] = []

    def grads(run: Callable[..., Any]) -> list[Tensor]:
        loss, keys = run(x)
        return list(torch.autograd.grad(loss + sum(key.pow(3).sum() for key in keys), list(module.parameters())))

    torch.compiler.reset()
    once = grads(torch.compile(module, backend=backend(True, lambda layers, _: counts.append(len(layers or ())))))
    assert counts == [LAYERS - 1]  # the first is another kind: its input needs no gradient
    torch.testing.assert_close(once, grads(module))


def test_the_call_that_keeps_a_layer_from_being_traced_once_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Calling(Block):
        def forward(self, x: Tensor, *given: Tensor) -> Tensor:
            return x + self.narrow(doubled(F.gelu(self.wide(x))))

    with caplog.at_level("DEBUG", "lightning_zero.compile.layer_dedup"):
        assert joint_graph(Stack(Calling), True)[1] == 0
    assert caplog.text.count("is traced alone (doubled") == LAYERS


@torch.compiler.allow_in_graph
def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_what_needs_no_gradient_and_constants_keep_no_layer_from_being_traced_once() -> None:
    check_tensor_arguments(lambda name, args: args)  # replaces torch.tensor, as each engine does
    torch._dynamo.trace_rules.clear_lru_cache()  # as torch.distributed.init_process_group does
    torch.manual_seed(0)
    module, x = Cached(Windowed), torch.randn(3, 6, WIDTH, requires_grad=True)
    counts: list[int] = []
    torch.compiler.reset()
    once = torch.compile(module, backend=backend(True, lambda layers, _: counts.append(len(layers or ()))))(x)
    assert counts == [LAYERS - 1]  # the first is another kind: its input is an input of the graph
    plain = module(x)
    torch.testing.assert_close(once, plain)
    weights = [x, *(weight for layer in module.layers for weight in (*layer.wide.parameters(), layer.narrow.weight))]
    torch.testing.assert_close(torch.autograd.grad(once[0], weights), torch.autograd.grad(plain[0], weights))


def test_a_number_that_changes_keeps_no_layer_from_being_traced_once() -> None:
    class Scaled(Stack):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    module, x, counts = Scaled(Block), torch.randn(3, 6, WIDTH), list[int]()
    torch.compiler.reset()
    torch.compile(lambda x: x * 2, backend="aot_eager")(x)  # warm up checks that torch makes once per process
    environ = dict(os.environ)
    run = torch.compile(module.eval(), backend=backend(True, lambda layers, _: counts.append(len(layers or ()))))
    for module.scale in (1.0, 2.0, 3.0):
        torch.testing.assert_close(run(x), module(x))
    assert counts == [LAYERS, LAYERS]  # for one number, and for any
    assert os.environ == environ


def test_what_layers_draw_and_hand_on_is_drawn_in_its_turn() -> None:
    module, x = Cached(Masking), torch.randn(3, 6, WIDTH, requires_grad=True)
    torch.compiler.reset()
    found = []
    for run in (torch.compile(module, backend=backend(True)), module):
        torch.manual_seed(0)
        found.append(run(x))
    torch.testing.assert_close(*found)


def test_gradients_in_other_strides_cost_a_trace_or_two_and_not_one_for_each_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def counted(self: LayerDedup, graph: Graph) -> Graph:
        tried.append(len(self))
        return inline(self, graph)

    tried: list[int] = []
    inline = LayerDedup.expand
    monkeypatch.setattr(LayerDedup, "expand", counted)
    assert joint_graph(Permuted(), True)[1] == LAYERS
    permuted = len(tried)
    assert permuted <= 2  # torch 2.11 happens to find them in the traced strides
    # The last in its strides, then those before it in theirs. With torch 2.11 none matches: a layer traced alone has
    # its gradient in the strides of its result.
    assert joint_graph(Turned(), True)[1] == (0 if torch.__version__.startswith("2.11.") else LAYERS)
    assert len(tried) - permuted <= 3
    assert set(tried) == {LAYERS}


def test_equal_parts_that_are_next_to_nothing_are_left_where_they_are() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Projecting())
    assert joint_graph(module, True)[1] == 0  # another trace of the whole graph for one mismatch takes longer


def test_a_kind_of_layers_that_does_not_fit_is_given_up_at_its_second_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfit(self: LayerExpansion, standin: Node) -> None:
        tried.append(self._number)
        raise DedupFailed("it does not fit", self._number)

    tried: list[int] = []
    monkeypatch.setattr(LayerExpansion, "forward", unfit)
    assert joint_graph(Stack(Block), True)[1] == 0
    assert len(tried) == 2  # of four: each costs another trace of the whole graph


def test_what_layers_have_read_and_no_backward_needs_may_be_written_into() -> None:
    same_graph(Counting(), LAYERS)
