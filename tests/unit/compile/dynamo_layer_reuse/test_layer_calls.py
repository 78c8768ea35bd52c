"""Equal layers are traced once, into the graph that Dynamo makes of traced layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_arg

from lightning_zero.compat.dynamo import mark_dynamic
from lightning_zero.compat.graphs import EXAMPLE_VALUE, GRAPH_ARG, NN_MODULE_STACK, SOURCE_FN_STACK
from lightning_zero.compile.capture.dynamo_graph import node_storage
from tests.unit.compile.dynamo_layer_reuse.layers import WIDTH, Attention, Compiled, Layer, Model

X = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
MASK = torch.arange(3 * WIDTH).view(3, WIDTH) % 3 == 0


def described(graph: GraphModule) -> list[Any]:
    """Return the contents of a graph without the names of nodes."""
    nodes = list(graph.graph.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    memory = [node_storage(node) for node in nodes]
    found = []
    for node, storage in zip(nodes, memory, strict=True):
        value, origin = node.meta.get(EXAMPLE_VALUE), node.meta.get(GRAPH_ARG)
        form = (
            (value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad)
            if isinstance(value, Tensor)
            else None
        )
        read = map_arg((node.args, node.kwargs), lambda one: f"%{place[one]}")
        source = origin.source.name if node.op == "placeholder" else None
        modules = list(node.meta.get(NN_MODULE_STACK, {}).items())
        callers = [name for _, name in node.meta.get(SOURCE_FN_STACK, [])]
        found.append((node.op, str(node.target) if source is None else source, str(read), memory.index(storage)))
        found.append((None if node.op == "placeholder" else (modules, callers, node.meta.get("stack_trace")), form))
    return found


@pytest.mark.parametrize("given", [{}, {"mask": MASK}], ids=["plain", "with an argument by name"])
def test_the_graph_equals_the_one_of_traced_layers(given: dict[str, Tensor]) -> None:
    model = Model()
    plain, once = Compiled(model, once=False, look=described), Compiled(model, look=described)
    plain(X, **given)
    torch._dynamo.reset()
    once(X, **given)
    assert plain.seen == once.seen
    assert plain.traced["Layer"] == 5
    assert once.traced["Layer"] == 1 + len(given)  # the first layer's argument is not realized
    assert once.traced["Attention"] == 1 + len(given)


def gradients(model: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Return loss, gradients and buffers."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = call(*args, **kwargs)
    loss.backward()
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [loss.detach(), *(param.grad for param in model.parameters()), *buffers]


def check(model: nn.Module, compiled: Compiled, *args: Any, **kwargs: Any) -> None:
    """Compare loss, gradients, buffers and attributes with eager code."""
    twin = copy.deepcopy(model)
    found, wanted = gradients(model, compiled, *args, **kwargs), gradients(twin, twin, *args, **kwargs)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    states = [{name: vars(part).get(name) for name in ("calls", "seen")} for part in model.modules()]
    assert states == [{name: vars(part).get(name) for name in ("calls", "seen")} for part in twin.modules()]


def scaled(model: Model) -> None:
    model.layers[3].attention.scale = 2.0  # type: ignore[union-attr]


def frozen(model: Model) -> None:
    model.layers[3].attention.inner.weight.requires_grad_(False)  # type: ignore[union-attr]


def hooked(model: Model) -> None:
    model.layers[3].attention.register_forward_hook(lambda module, args, result: result * 3)


def evaluated(model: Model) -> None:
    model.layers[3].eval()


def normed(model: Model) -> None:
    model.layers[3].norm.eps = 0.5  # type: ignore[union-attr, assignment]


def replaced(model: Model) -> None:
    model.layers[3].drop = nn.Identity()  # type: ignore[union-attr]


def without_bias(model: Model) -> None:
    model.layers[3].attention.inner.bias = None  # type: ignore[union-attr]


def patched(model: Model) -> None:
    model.layers[3].attention.forward = lambda x, mask=None: x * 5  # type: ignore[union-attr, method-assign, assignment]


def tied(model: Model) -> None:
    model.layers[3].attention.inner.weight = model.layers[1].attention.inner.weight  # type: ignore[union-attr]


def tied_in_itself(model: Model) -> None:
    layer: Any = model.layers[3]
    layer.norm.weight = layer.norm.bias


def repeated(model: Model) -> None:
    model.layers[3] = model.layers[1]


CHANGES = [scaled, frozen, hooked, evaluated, normed, replaced, without_bias, patched, tied, tied_in_itself, repeated]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("later", [False, True], ids=["before", "behind the first call"])
@pytest.mark.exhaustive_variants(
    "before-tied",
    "before-tied_in_itself",
    "before-repeated",
    "behind the first call-scaled",
    "behind the first call-frozen",
    "behind the first call-hooked",
    "behind the first call-evaluated",
    "behind the first call-normed",
    "behind the first call-replaced",
    "behind the first call-without_bias",
    "behind the first call-patched",
)
def test_a_layer_that_differs_computes_its_own_result(change: Callable[[Model], None], later: bool) -> None:
    counts = []
    for once in (False, True):
        torch.manual_seed(0)
        model = Model()
        compiled = Compiled(model, once)
        if later:
            check(model, compiled, X, mask=MASK)
            if change is hooked:
                torch._dynamo.reset()  # torch.compile does not see new hooks
        change(model)
        check(model, compiled, X, mask=MASK)
        check(model, compiled, X)
        counts.append(len(compiled.graphs))
    assert counts[0] == counts[1]


def test_other_layers_are_copied() -> None:
    model = Model(count=8)
    scaled(model)
    compiled = Compiled(model)
    check(model, compiled, X)
    assert compiled.traced["Layer"] == 2


class Functional(Layer):
    """Calls a function that is an attribute."""

    def __init__(self, number: int, function: Any) -> None:
        super().__init__(number)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.attention(x))


def with_factor(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


class Factor:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


DIFFERENT: dict[str, Callable[[int], Any]] = {
    "functions": lambda number: F.relu if number != 3 else F.gelu,
    "closures": lambda number: with_factor(2.0 + (number == 3)),
    "partial functions": lambda number: partial(torch.mul, other=2.0 + (number == 3)),
    "objects": lambda number: Factor(2.0 + (number == 3)),
    "modules": lambda number: nn.ReLU() if number != 3 else nn.GELU(),
    "alike": lambda number: F.relu,
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_a_layer_that_calls_another_function_computes_its_own_result(kind: str) -> None:
    model = Model(lambda number: Functional(number, DIFFERENT[kind](number)))
    compiled = Compiled(model)
    check(model, compiled, X)
    if kind == "alike":
        assert compiled.traced["Functional"] == 1


class Counting(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.attention(x) * self.calls


class Numbered(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x) * (self.number + 1)


class Averaging(Layer):
    """Writes to a buffer of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.norms = nn.BatchNorm1d(WIDTH)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1  # type: ignore[misc, operator]
        return x + self.attention(self.norms(x))


class Editing(Layer):
    """Mutates its argument."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(x.detach().clone())
        return x


class EditingItsOwn(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x)
        y[0] = 0.0
        y.mul_(2.0)
        return x + y


class Viewing(Layer):
    """Returns views of its argument and of an intermediate tensor."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return torch.cat([right, left], -1) + self.attention(x).t().contiguous().t()


class WithoutGrad(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.attention(x).abs().amax()
        return x + self.attention(x) / (1 + scale)


class Casting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.attention(x)
        return x + y.float()


class Breaking(Layer):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + self.attention(x)


KINDS = [Counting, Numbered, Averaging, Editing, EditingItsOwn, Viewing, WithoutGrad, Casting, Breaking]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.exhaustive_variants("Averaging")
def test_side_effects_of_layers_happen(kind: type[Layer]) -> None:
    model = Model(kind)
    compiled = Compiled(model)
    for _ in range(2):
        check(model, compiled, X)
    if kind in (EditingItsOwn, Viewing, WithoutGrad, Casting):
        assert compiled.traced[kind.__name__] == 1


class Pairs(Layer):
    def forward(self, x: Tensor, bias: Tensor | None, seen: list[Tensor], kept: Any = None) -> Any:
        if bias is None:
            bias = self.norm(x)
        seen.append(x)
        return x + self.attention(x) + bias, bias


class PairsModel(Model):
    """A list that layers append to, and a bias that the first one makes, as T5 has it."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        seen: list[Tensor] = []
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias, seen)
        return x.square().mean() + sum(one.mean() * at for at, one in enumerate(seen))  # type: ignore[return-value]


class Returning(Layer):
    def forward(self, x: Tensor, bias: Tensor | None) -> Any:
        if bias is None:
            bias = self.norm(x)
        return x + self.attention(x) + bias, bias, None


class ReturningModel(Model):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        bias = nothing = None
        for layer in self.layers:
            x, bias, nothing = layer(x, bias)
        assert nothing is None
        return x.square().mean()


def test_values_are_appended_to_lists() -> None:
    model = PairsModel(Pairs)
    check(model, Compiled(model), X)


def test_none_as_an_argument_needs_another_trace() -> None:
    model = ReturningModel(Returning)
    compiled = Compiled(model)
    check(model, compiled, X)
    assert compiled.traced["Returning"] == 2


class Sharing(Model):
    """Passes one tensor twice to some layers, and two tensors to others."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        x, other = self.head(x), x * 2
        for at, layer in enumerate(self.layers):
            x = layer(x, x if at % 2 else other)
        return x.square().mean()


class Adding(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.attention(x) + y


def test_one_tensor_for_two_arguments_needs_another_trace() -> None:
    model = Sharing(Adding)
    compiled = Compiled(model)
    check(model, compiled, X)
    assert compiled.traced["Adding"] == 2


class Memory(Model):
    """Writes to itself between layers that read it."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__(make)
        self.seen = 1.0
        for layer in self.layers:
            layer.owner = [self]  # type: ignore[assignment]

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        for at, layer in enumerate(self.layers):
            self.seen = 1.0 + at
            x = layer(x)
        return x.square().mean()


class Asking(Layer):
    owner: list[Any]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x) * self.owner[0].seen


def test_writes_between_layers_are_read() -> None:
    model = Memory(Asking)
    compiled, twin = Compiled(model), copy.deepcopy(model)
    assert torch.equal(compiled(X), twin(X))


class Written(Layer):
    """Mutates results of its parts, as Falcon does; only the parts are equal."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.other, self.turned = Attention(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.other(x)
        y += self.attention(x)
        y.mul_(self.number + 1.0)
        rows = self.turned(x).t()
        rows *= 0.5
        return y + rows.t().sin()


def test_results_of_copied_parts_may_be_mutated() -> None:
    model = Model(Written)
    compiled = Compiled(model)
    check(model, compiled, X)
    assert compiled.traced["Attention"] < 10


@pytest.mark.parametrize("setting", ["no_grad", "autocast"])
@pytest.mark.exhaustive_variants("autocast")
def test_settings_apply_to_the_layers_inside(setting: str) -> None:
    class Partly(Model):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            context = torch.no_grad() if setting == "no_grad" else torch.autocast("cpu", torch.bfloat16)
            with context:
                for layer in self.layers[:3]:
                    x = layer(x)
            for layer in self.layers[3:]:
                x = layer(x.float())
            return x.square().mean()

    model = Partly(count=6)
    compiled = Compiled(model)
    check(model, compiled, X)
    assert compiled.traced["Layer"] >= 2


def test_equal_parts_of_different_layers_are_copied() -> None:
    model = Model(Numbered, count=12)
    compiled = Compiled(model)
    check(model, compiled, X)
    assert compiled.traced["Numbered"] == 12
    assert compiled.traced["Attention"] == 1


def test_later_changes_of_an_attribute_recompile() -> None:
    model = Model(count=4)
    compiled = Compiled(model)
    check(model, compiled, X)
    for at in range(4):
        layer: Any = model.layers[at]
        layer.attention.scale = 3.0 + at
        check(model, compiled, X)
    assert len(compiled.graphs) == 5


def test_a_layer_that_cannot_be_copied_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("something that nobody has thought of")

    monkeypatch.setattr("lightning_zero.compile.dynamo_layer_reuse.layer_copy._variable", fails)
    model = Model()
    compiled = Compiled(model)
    check(model, compiled, X)
    assert compiled.traced["Layer"] == 5
    [graph] = compiled.graphs
    assert sum(node.target is torch._C._nn.linear for node in graph.graph.nodes) == 6


def test_attention_is_copied_if_only_it_is_equal() -> None:
    model = Model(lambda number: nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Attention() for _ in range(number + 1)]))
    compiled = Compiled(model)
    check(model, compiled, X)
    assert compiled.traced["Attention"] == 1


class Knowing(Layer):
    """Compares itself with the layers of its owner."""

    owner: list[Any]
    ways: tuple[Callable[[Any, list[nn.Module]], bool], ...] = (
        lambda self, layers: self is layers[-1],
        lambda self, layers: layers.index(self) == 3,
        lambda self, layers: self in layers[2:],
        lambda self, layers: any(layer is self for layer in layers[:2]),
        lambda self, layers: {layer: at for at, layer in enumerate(layers)}[self] == 2,
        lambda self, layers: self.attention.inner.weight is layers[3].attention.inner.weight,  # type: ignore[union-attr]
    )
    way = 0

    def forward(self, x: Tensor) -> Tensor:
        chosen = type(self).ways[self.way](self, list(self.owner[0].layers))
        return x + self.attention(x) * (2.0 if chosen else 1.0)


@pytest.mark.parametrize("way", range(6))
def test_a_layer_that_compares_identities_computes_its_own_result(way: int) -> None:
    model = Model(Knowing)
    for layer in model.layers:
        layer.owner, layer.way = [model], way  # type: ignore[assignment]
    results = [Compiled(model, once)(X) for once in (False, True)]
    assert torch.equal(*results)
    assert torch.equal(results[1], model(X))


class Shortening(Layer):
    """Each layer of two has half of its input's rows as results."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = super().forward(x, mask)
        return y[: y.shape[0] // 2 + 1] * y.shape[0] if self.number % 2 else y


@pytest.mark.parametrize(("kind", "traced"), [(Layer, 1), (Shortening, 5)])
def test_layers_of_equal_formulas_of_sizes_are_traced_once(kind: type[Layer], traced: int) -> None:
    model = Model(kind).eval()
    compiled = Compiled(model, dynamic=None)
    for rows in (20, 31, 64, 9):
        x = torch.randn(rows, WIDTH)
        mark_dynamic(x, 0)
        assert torch.allclose(compiled(x), model(x))
    assert len(compiled.graphs) == 1
    assert compiled.traced[kind.__name__] == traced


class Way(Enum):
    PLAIN = 1
    SCALED = 2


class Choosing(Layer):
    """As wrappers of transformers do in each call."""

    ways = (Way.SCALED,)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x * 2 if Way.PLAIN in self.ways or self.ways[0] is Way.PLAIN else x, mask)


def test_members_of_an_enum_do_not_reject_reuse() -> None:
    model = Model(Choosing)
    compiled = Compiled(model)
    check(model, compiled, X)
    assert compiled.traced["Choosing"] == 1


def test_numbers_that_change_in_all_layers_compile_as_often_as_without_reuse() -> None:
    counts = []
    for once in (False, True):
        model = Model().eval()
        compiled = Compiled(model, once, dynamic=None)
        for scale in (0.5, 0.4, 0.3, 0.2, 0.1):
            for layer in model.layers:
                layer.attention.scale = scale  # type: ignore[union-attr, assignment]
            assert torch.allclose(compiled(X), model(X))
        counts.append(len(compiled.graphs))
    assert counts[0] == counts[1]


class Noting(Layer):
    """Notes something at a tensor that it returns, which the next one reads."""

    def forward(self, x: Any) -> Any:
        y = self.attention(x) * getattr(x, "note", 1.0)
        y.note = getattr(x, "note", 1.0) + 1
        return y


class Zero(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.zero = -0.0 if number == 3 else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x).abs() * math.copysign(1.0, self.zero)


@pytest.mark.parametrize("kind", [Noting, Zero])
def test_attributes_of_tensors_and_signs_of_zero_are_read(kind: type[Layer]) -> None:
    model = Model(kind)
    check(model, Compiled(model), X)


def test_global_hooks_are_called() -> None:
    model = Model()

    def hook(module: nn.Module, args: Any, result: Any) -> Any:
        return result * 3 if module is model.layers[3] else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        assert torch.equal(Compiled(model.eval())(X), model(X))
    finally:
        handle.remove()
