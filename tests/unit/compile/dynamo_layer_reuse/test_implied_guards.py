"""Guards that are left out of a stamped layer say nothing that others do not say: compiled code sees what changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstDictKeySource
from torch._guards import TracingContext

from lightning_zero.compat.compiler import dynamo_config
from lightning_zero.compat.dynamo import Guard, guard_name
from lightning_zero.compile.dynamo_layer_reuse.implied_guards import OF_ONE_VALUE, not_implied
from tests.unit.compile.dynamo_layer_reuse.layers import WIDTH, Compiled, Layer, Model

X = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


def shifted(value: Tensor) -> Tensor:
    return value + 1


def doubled(value: Tensor) -> Tensor:
    return value * 2


class Classy(Layer):
    """What it reads of its class: a number, a property with a cell, a function."""

    power = 1.0

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.names = ("a", "b")
        self.drop.p = 0.0

    @property
    def half(self) -> float:
        return self.attention.scale / 2 if self.names[0] == "a" else 3.0

    def bent(self, x: Tensor) -> Tensor:
        return shifted(x)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.bent(super().forward(x)) * self.power * self.half * len(self.names)


class Other(Classy):
    def bent(self, x: Tensor) -> Tensor:
        return doubled(x)


def of_the_class(name: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda model, patch: patch.setattr(Classy, name, value)


def of_a_layer(name: str, value: Any, number: int = 3) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda model, patch: setattr(model.layers[number], name, value)


CHANGES = {
    "a number of the class": of_the_class("power", 3.0),
    "a method of the class": of_the_class("bent", lambda self, x: doubled(x)),
    "the code of a property": of_the_class("half", property(lambda self: 7.0)),
    "the forward of the class": of_the_class("forward", lambda self, x, mask=None: x * 3),
    "a number of a layer in front of the class's": of_a_layer("power", 2.0),
    "a method of a layer in front of the class's": of_a_layer("bent", doubled),
    "the class of a layer": of_a_layer("__class__", Other),
    "the class of the one that was traced": of_a_layer("__class__", Other, 1),
    "a shorter tuple": of_a_layer("names", ("a",)),
    "another tuple": of_a_layer("names", ("c", "b")),
    "a list": of_a_layer("names", ["a", "b", "c"]),
}


SEEN = [name for name in CHANGES if name not in ("a method of the class", "the forward of the class")]


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.exhaustive_variants(
    "a number of the class-1",
    "the code of a property-3",
    "a number of a layer in front*-3",
    "a method of a layer in front*-1",
    "the class of a layer-1",
    "the class of the one that was traced-1",
    "a shorter tuple-3",
    "another tuple-3",
    "a list-3",
    "the forward of the class-1",
    "a method of a layer in front*-3",
    "another tuple-1",
)
def test_what_changes_is_seen_where_it_is_in_layers_that_are_traced(change: Any, calls: int) -> None:
    """Dynamo takes some of a class for granted: its methods."""
    found = []
    for once in (False, True):
        torch.manual_seed(0)
        model = Model(Classy)
        compiled = Compiled(model, once)
        with pytest.MonkeyPatch.context() as patch:
            results = [compiled(X) for _ in range(calls)]  # unchanged dictionaries are not looked into after some calls
            change(model, patch)
            results += [compiled(X) for _ in range(calls)]
        found.append(([result.item() for result in results], len(compiled.graphs)))
    assert compiled.traced["Classy"] < 10
    assert found[0] == found[1]


@pytest.mark.parametrize("change", SEEN)
def test_what_changes_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(Classy)
    compiled = Compiled(model)
    assert torch.equal(compiled(X), model(X))
    CHANGES[change](model, monkeypatch)
    assert torch.equal(compiled(X), model(X))
    assert len(compiled.graphs) == 2


def guards_of(model: Model, once: bool) -> list[Guard]:
    """Those that there are when the graph is."""
    compiled = Compiled(model, once, look=lambda _: list(TracingContext.get().guards_context.dynamo_guards))
    compiled(X)
    return list(compiled.seen[0])


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "not guarded"])
def test_hooks_are_guarded_where_dynamo_guards_them(guarded: bool) -> None:
    model = Model(Classy)
    with dynamo_config.patch(skip_nnmodule_hook_guards=not guarded):
        compiled = Compiled(model)
        compiled(X)
        model.layers[3].attention.register_forward_hook(lambda *given: given[-1] * 3)  # type: ignore[operator, union-attr]
        assert torch.equal(compiled(X), model(X)) == guarded


def of_layer(number: int, guards: list[Guard]) -> list[str]:
    """Paths of those that ask whether a value is what it was."""
    path = f"['layers']._modules['{number}']"
    return [guard.name for guard in guards if path in guard.name and guard_name(guard) in OF_ONE_VALUE]


def test_a_stamped_layer_asks_one_thing_of_the_class_of_each_object() -> None:
    found = guards_of(Model(Classy), once=True)
    first, other = of_layer(0, found), of_layer(3, found)
    objects = [re.findall(r"type\(([^()]*)\)", name)[0] for name in other if "type(" in name]
    assert len(objects) == len(set(objects)) > 0
    assert sum("type(" in name for name in first) > len(objects)


def test_what_is_left_out_is_what_others_say() -> None:
    """Of the class of an object only where this class is guarded; and no guard of two paths is."""
    guards = guards_of(Model(Classy, count=1), once=False)
    of_classes = [guard for guard in guards if "type(" in guard.name]
    kept = list(not_implied(guards))
    assert 0 < sum("type(" in guard.name for guard in kept) < len(of_classes)
    untyped = [guard for guard in guards if guard_name(guard) != "TYPE_MATCH"]
    assert {guard.name for guard in of_classes} <= {guard.name for guard in not_implied(untyped)}
    classes = {guard.name for guard in guards if guard_name(guard) == "TYPE_MATCH"}
    values = {guard.name for guard in guards if guard_name(guard) in ("CONSTANT_MATCH", "EQUALS_MATCH")}
    tensors = {guard.name for guard in guards if guard_name(guard) == "TENSOR_MATCH"}
    assert classes - values - tensors == {guard.name for guard in kept if guard_name(guard) == "TYPE_MATCH"}
    assert {guard.name for guard in guards if "type(" not in guard.name and "_hooks" not in guard.name} == {
        guard.name for guard in kept if "type(" not in guard.name and "_hooks" not in guard.name
    }
    two_paths = Guard(of_classes[0].originating_source, partial(_two_paths, source_b=guards[0].originating_source))
    assert two_paths in list(not_implied([*guards, two_paths]))


def test_what_is_read_of_a_class_by_something_else_of_a_module_is_asked() -> None:
    guards = guards_of(Model(Classy, count=1), once=False)
    number = next(guard for guard in guards if guard.name.endswith("['power']"))
    table: Any = number.originating_source
    key = ConstDictKeySource(guards[-1].originating_source, 0)
    by_key = Guard(replace(table, index=key), number.create_fn)
    assert by_key in list(not_implied([*guards, by_key]))
    assert number not in list(not_implied(guards))


def _two_paths(builder: Any, guard: Guard, source_b: Any) -> None:
    """Of Dynamo's name."""


_two_paths.__name__ = "DUPLICATE_INPUT"
