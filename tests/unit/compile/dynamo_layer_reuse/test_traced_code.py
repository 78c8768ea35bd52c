"""Layers that read more than their arguments and attributes compute their own results."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.compile.dynamo_layer_reuse.layers import WIDTH, Attention, Compiled, Layer, Model

X = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
TABLE = torch.full((WIDTH,), 2.0)
FACTORS = {"scale": 2.0}
PART = nn.Sequential(nn.Linear(WIDTH, WIDTH))
LAYERS: list[nn.Module] = []


class Scaled(Layer):
    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.scale: Any = 1.0
        self.values = [1.0, [1.0]]
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        inner: Any = self.values[1]
        return x + self.drop(self.attention(x)) * self.scale * self.values[0] * inner[0]


class Told(Model):
    """Writes to its layers before it calls them."""

    def __init__(self, tell: Callable[[Any, Any, int], None]) -> None:
        super().__init__(Scaled)
        self.tell = tell
        self.gates = [torch.full((WIDTH,), 1.0 + number) for number in range(5)]

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        for number, layer in enumerate(self.layers):
            self.tell(self, layer, number)
        return super().forward(x, **given)


def number(model: Any, layer: Any, at: int) -> None:
    layer.scale = 1.0 / (at + 1)


def tensor(model: Any, layer: Any, at: int) -> None:
    layer.scale = model.gates[at]


def mode(model: Any, layer: Any, at: int) -> None:
    layer.train(at < 2)


def part(model: Any, layer: Any, at: int) -> None:
    layer.drop.p = 0.2 * at


def item(model: Any, layer: Any, at: int) -> None:
    layer.values[0] = 1.0 + at


def inner_item(model: Any, layer: Any, at: int) -> None:
    layer.values[1][0] = 1.0 + at


class Owned(Layer):
    """Reads the first layer's weight, as relative positions are shared."""

    def first(self) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + F.linear(self.attention(x), self.first().attention.inner.weight)


class ByReference(Owned):
    owner: Callable[[], Any]

    def first(self) -> Any:
        return self.owner().layers[0]


class ByList(Owned):
    owners: list[Any]

    def first(self) -> Any:
        return self.owners[0].layers[0]


class ByGlobal(Owned):
    def first(self) -> Any:
        return LAYERS[0]


def owned(kind: type[Owned]) -> Model:
    model = Model(kind)
    for layer in model.layers:
        vars(layer).update(owner=weakref.ref(model), owners=[model])
    LAYERS[:] = model.layers
    return model


class Asked(Layer):
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
    def scale(self) -> float:
        return 1.0 + self.number

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.attention(x) * self.scale()


class OfAll(Layer):
    """The first one's table is a global, too, that is read before."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.table = TABLE if number == 0 else torch.full((WIDTH,), 1.0 + number)
        self.part = PART if number == 0 else nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.part(x) + self.attention(x) * self.table


class ReadsTable(Model):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return super().forward(x * TABLE, **given)


class ReadsPart(Model):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return super().forward(PART(x), **given)


class ReadsFactors(Model):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return super().forward(x * FACTORS["scale"], **given)


class WithFactors(Scaled):
    """The first one's dictionary is a global, too, that is read before."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.factors = FACTORS if number == 0 else {"scale": 1.0 + number}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) * self.factors["scale"]


CASES: dict[str, Callable[[], nn.Module]] = {
    **{
        f"told {tell.__name__}": lambda tell=tell: Told(tell) for tell in (number, tensor, mode, part, item, inner_item)
    },
    **{kind.__name__: lambda kind=kind: owned(kind) for kind in (ByReference, ByList, ByGlobal)},
    "assume_constant_result": lambda: Model(Asked),
    "a global table": lambda: ReadsTable(OfAll),
    "a global part": lambda: ReadsPart(OfAll),
    "a global dictionary": lambda: ReadsFactors(WithFactors),
}


def results(model: nn.Module, call: Callable[..., Any]) -> list[Tensor | None]:
    torch.manual_seed(7)
    model.zero_grad()
    loss = call(X)
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("case", CASES)
def test_each_layer_computes_its_own_result(case: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = CASES[case]()
    wanted = results(model, model)
    found = results(model, Compiled(model))
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


class Recorded(Model):
    """Adds to a list, and to a dictionary, that have tensors in them."""

    def __init__(self) -> None:
        super().__init__()
        self.history = [torch.zeros(WIDTH)]
        self.notes = {"first": torch.zeros(WIDTH)}

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        self.history.append(x.detach())
        self.notes["second"] = x.detach() * 2
        return super().forward(x, **given)


def test_containers_of_tensors_are_written_and_layers_copied() -> None:
    torch._dynamo.reset()
    model = Recorded().eval()
    twin, compiled = copy.deepcopy(model), Compiled(model)
    assert torch.equal(compiled(X, mask=None), twin(X, mask=None))
    assert [value.tolist() for value in model.history] == [value.tolist() for value in twin.history]
    assert torch.equal(model.notes["second"], twin.notes["second"])
    assert compiled.traced["Layer"] < 5


def test_writes_to_other_layers_do_not_reject_reuse() -> None:
    class Others(Model):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.ModuleList(Scaled() for _ in range(3))

        def forward(self, x: Tensor, **given: Any) -> Tensor:
            for number, layer in enumerate(self.front):
                layer.scale = 1.0 + number
                x = layer(x)
            return super().forward(x, **given)

    torch._dynamo.reset()
    model = Others().eval()
    compiled = Compiled(model)
    assert torch.equal(compiled(X), model(X))
    assert compiled.traced["Layer"] == 1
    assert compiled.traced[Attention.__name__] < 8


class Classy(Layer):
    """Calls functions of its class, which is a global, like layers of transformers."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        kind = type(self)
        if kind is not Classy or not isinstance(self, Layer) or self.__class__.__name__ != "Classy":
            return x
        return F.gelu(super().forward(x)) + halved(x) * TABLE


def halved(x: Tensor) -> Tensor:
    return x / 2


def test_layers_that_name_their_class_and_globals_are_copied() -> None:
    torch._dynamo.reset()
    model = ReadsTable(Classy).eval()
    compiled = Compiled(model)
    assert torch.equal(compiled(X), model(X))
    assert compiled.traced["Classy"] == 1
