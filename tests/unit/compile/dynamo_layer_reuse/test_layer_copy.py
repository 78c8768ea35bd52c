"""Weights of copied layers are inputs with the guards of traced layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_zero.compat.graphs import EXAMPLE_VALUE, GRAPH_ARG, NN_MODULE_STACK, STACK_TRACE
from lightning_zero.compile.dynamo_layer_reuse import layer_copy
from lightning_zero.compile.dynamo_layer_reuse.trace_inputs import ReuseRejected
from tests.unit.compile.dynamo_layer_reuse.layers import WIDTH, Compiled, Layer, Model

X = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


def noted(graph: GraphModule) -> list[Any]:
    """Return the metadata of all inputs."""
    found = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            value, origin = node.meta[EXAMPLE_VALUE], node.meta[GRAPH_ARG]
            form = type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
            found.append((node.name, node.target, node.type, sorted(node.meta), node.meta["tensor_dict"], form))
            found.append((list(node.meta.get(NN_MODULE_STACK, {}).items()), node.meta.get(STACK_TRACE)))
            found.append((origin.source, origin.example, origin.fake_tensor is value, origin.is_tensor))
            found.append((type(value.fake_mode), isinstance(value, nn.Parameter), value.is_leaf))
    return found


def compare(make: Callable[[], Model], change: Callable[[Model], None] = lambda model: None) -> None:
    """Compile the same modules with, without and with reuse."""
    model = make()
    change(model)
    seen = []
    for once in (False, True, False):
        torch._dynamo.reset()
        compiled = Compiled(model, once, look=noted)
        compiled(X)
        seen.append(compiled.seen)
    assert seen[0] == seen[1] == seen[2]


def test_inputs_equal_those_of_traced_layers() -> None:
    compare(Model)


def marked_static(model: Any) -> None:
    torch._dynamo.mark_static_address(model.layers[3].attention.inner.weight, guard=False)


def half_of_them_noted(model: Any) -> None:
    for layer in model.layers[::2]:
        layer.attention.inner.weight.tag = "mine"


def frozen(model: Any) -> None:
    model.layers[3].attention.inner.bias.requires_grad_(False)


@pytest.mark.parametrize("change", [marked_static, half_of_them_noted, frozen])
def test_marks_of_weights_are_copied_to_inputs(change: Callable[[Model], None]) -> None:
    compare(Model, change)


class Buffered(Layer):
    """Has a buffer, a view as an attribute, and a tensor that is no part of it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.table: Tensor
        self.register_buffer("table", torch.full((WIDTH,), 2.0))
        self.view = torch.arange(2.0 * WIDTH)[WIDTH:]
        self.plain = torch.ones(1, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x) * self.table + self.view + self.plain.sum(0)


def test_buffers_and_plain_tensors_become_inputs() -> None:
    compare(lambda: Model(Buffered))


@pytest.mark.parametrize("name", ["table", "plain"])
@pytest.mark.exhaustive_variants("plain")
def test_sizes_that_change_compile_as_often_as_without_reuse(name: str) -> None:
    counts = []
    for once in (False, True):
        torch.manual_seed(0)
        model = Model(Buffered).eval()
        compiled = Compiled(model, once, dynamic=None)
        for size in (1, 2, 3, 4):
            for layer in model.layers:
                setattr(layer, name, torch.ones(size, WIDTH) if name == "plain" else torch.ones(3 // min(size, 3), 1))
            assert torch.allclose(compiled(X), model(X))
        counts.append(len(compiled.graphs))
    assert counts[0] == counts[1]


WEIGHTS: dict[str, Callable[[nn.Parameter], Any]] = {
    "of another dtype": lambda weight: nn.Parameter(weight.detach().double()),
    "of another size": lambda weight: nn.Parameter(weight.detach()[:1]),
    "with other strides": lambda weight: nn.Parameter(weight.detach().clone().t()),
    "frozen": lambda weight: nn.Parameter(weight.detach(), requires_grad=False),
    "of another class": lambda weight: Special(weight.detach()),
}


class Special(nn.Parameter):
    pass


class Weighted(nn.Module):
    """Accepts weights of any layout."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, number + 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + (x.new_ones(1, self.weight.shape[0]) @ self.weight.to(x.dtype)))


@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("change", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.exhaustive_variants(
    "of another dtype-1",
    "of another dtype-4",
    "of another size-0",
    "of another size-4",
    "with other strides-0",
    "with other strides-1",
    "frozen-0",
)
def test_a_later_weight_of_another_layout_recompiles(change: Callable[[nn.Parameter], Any], number: int) -> None:
    model: Any = Model(Weighted)
    compiled = Compiled(model)
    compiled(X)
    assert compiled.traced["Weighted"] == 1
    model.layers[number].weight = change(model.layers[number].weight)
    assert torch.equal(compiled(X), model(X))
    assert len(compiled.graphs) == 2
    compiled(X).backward()
    assert (model.layers[number].weight.grad is None) == (not model.layers[number].weight.requires_grad)


@pytest.mark.parametrize("at", [0, 1])
def test_a_layer_that_is_traced_after_a_rejection_is_guarded(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs exist already, and reading them adds no guards."""
    plain, asked = layer_copy._sizes, 0

    def sizes(node: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 2 * at + 1:
            raise ReuseRejected("for once")
        return plain(node)

    monkeypatch.setattr(layer_copy, "_sizes", sizes)
    model: Any = Model(Weighted)
    compiled = Compiled(model)
    compiled(X)
    assert compiled.traced["Weighted"] == 2
    model.layers[1].weight = nn.Parameter(model.layers[1].weight.detach().double())
    model.layers[1].norm.weight.requires_grad_(False)
    assert torch.equal(compiled(X), model(X))
    assert len(compiled.graphs) == 2


def test_weights_may_share_memory() -> None:
    def tied(model: Any) -> None:
        first, second, third, fourth, _ = model.layers
        third.weight = first.weight
        fourth.weight = nn.Parameter(second.weight.detach())  # another one in the same memory

    compare(lambda: Model(Weighted), tied)
    model = Model(Weighted)
    tied(model)
    assert torch.equal(Compiled(model)(X), model(X))


class ClassyNumber(Layer):
    scale = 0.5

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x) * self.scale


def test_class_numbers_that_change_compile_as_often_as_without_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for once in (False, True):
        model = Model(ClassyNumber).eval()
        compiled = Compiled(model, once, dynamic=None)
        for scale in (0.5, 0.4, 0.3, 0.2, 0.1):
            monkeypatch.setattr(ClassyNumber, "scale", scale)
            assert torch.allclose(compiled(X), model(X))
        counts.append(len(compiled.graphs))
    assert counts[0] == counts[1]


class Looping(Model):
    """Its layers are called by code that its forward calls, as those of transformers' models are."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return self.body(self.head(x)).square().mean()


@pytest.mark.parametrize("numbers", [(1,), range(5), "in turn", "nan"], ids=["one", "all", "in turn", "nan"])
@pytest.mark.exhaustive_variants("in turn", "all")
def test_layer_numbers_that_change_compile_as_often_as_without_reuse(numbers: Any) -> None:
    counts = []
    for once in (False, True):
        torch.manual_seed(0)
        model: Any = Looping().eval()
        compiled = Compiled(model, once, dynamic=None)
        found = []
        for call in range(8):
            changed = {"in turn": [call % 4 + 1], "nan": [1]}.get(numbers, numbers) if call else []
            for number in changed:
                model.layers[number].attention.scale = float("nan") if numbers == "nan" else 0.5 + call
            assert torch.equal(compiled(X), model(X)) or numbers == "nan" or torch.allclose(compiled(X), model(X))
            found.append(len(compiled.graphs))
        counts.append(found)
    assert counts[0] == counts[1]
