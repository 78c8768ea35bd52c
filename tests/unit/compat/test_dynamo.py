"""What ``compat/dynamo.py`` takes from torch still means the same."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.compat.compiler import TensorVariable
from lightning_zero.compat.dynamo import (
    BuiltinVariable,
    ChainedSource,
    ConstantVariable,
    DictVariable,
    Guard,
    HashableKey,
    ListVariable,
    ModuleVariable,
    ObjectVariable,
    TupleVariable,
    TypeSource,
    VariableBuilder,
    comparisons,
    dispatch_keys,
    guard_name,
    hooks_of_all_modules,
    is_written,
    path_in_modules,
    translators,
    value_at,
    was_there,
    wrap_proxy,
)
from lightning_zero.compat.graphs import EXAMPLE_VALUE


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: list[int] = []
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.seen.append(1)
        return args[0] * self.weight


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Inner()])

    def forward(self, x: Tensor) -> Any:
        y = x + 1
        return self.parts[0](y, (y, None), [y], {"y": y}, number=3)


def seen_in_call(look: Callable[..., Any], behind: bool = False) -> Any:
    """What ``look(variable, tx, args, kwargs)`` says while Dynamo traces a call of the inner module."""
    found = []
    plain = ModuleVariable.call_function

    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        inner = isinstance(variable.value, Inner)
        if inner and not behind:
            found.append(look(variable, tx, args, kwargs))
        result = plain(variable, tx, args, kwargs)
        if inner and behind:
            found.append(look(variable, tx, args, kwargs))
        return result

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleVariable, "call_function", call_function)
        torch.compile(Outer(), backend="eager")(torch.ones(3))
    return found[0]


def test_arguments_are_variables_by_their_kinds() -> None:
    kinds = seen_in_call(
        lambda variable, tx, args, kwargs: [type(value.realize()) for value in [*args, kwargs["number"]]]
    )
    assert kinds[:4] == [TensorVariable, TupleVariable, ListVariable, DictVariable]
    assert issubclass(kinds[4], ConstantVariable)


def test_a_module_knows_its_path() -> None:
    def look(variable: Any, *_: Any) -> Any:
        source = variable.source
        return path_in_modules(variable), isinstance(source, ChainedSource) and isinstance(source.base, ChainedSource)

    assert seen_in_call(look) == ("L['self'].parts.0", True)


def test_what_was_written_is_told_from_what_is_read() -> None:
    def look(variable: Any, tx: Any, *_: Any) -> Any:
        effects = tx.output.side_effects
        written = [one for one in effects.id_to_variable.values() if is_written(effects, one)]
        stored = {name for owner, names in effects.store_attr_mutations.items() if was_there(owner) for name in names}
        return [type(one) for one in written], stored

    assert seen_in_call(look) == ([], set())
    assert seen_in_call(look, behind=True) == ([ListVariable], {"calls"})


def test_an_input_and_a_result_can_be_made() -> None:
    def look(variable: Any, tx: Any, *_: Any) -> Any:
        path = next(one.originating_source for one in tx.output.guards if guard_name(one) == "TENSOR_MATCH")
        root = tx.output.root_tx
        value = path.get_value({"G": root.f_globals, "L": root.f_locals}, {}, {})
        made, again = (VariableBuilder(tx, path)(value) for _ in range(2))
        node = made.as_proxy().node
        doubled = tx.output.create_proxy("call_function", torch.add, (made.as_proxy(), made.as_proxy()), {})
        fake = node.meta[EXAMPLE_VALUE]
        with fake.fake_mode:
            result = wrap_proxy(tx, doubled, fake + fake)
        return node.op, again.as_proxy().node is node, type(result), result.as_proxy().node.target

    assert seen_in_call(look) == ("placeholder", True, TensorVariable, torch.add)


def test_a_path_goes_on_to_a_class() -> None:
    def look(variable: Any, tx: Any, *_: Any) -> Any:
        path, root = TypeSource(variable.source), tx.output.root_tx
        found = value_at(path, {"G": root.f_globals, "L": root.f_locals}, {})
        return found, isinstance(path, ChainedSource) and path.base == variable.source

    assert seen_in_call(look) == (Inner, True)


def test_values_are_found_as_torch_finds_them() -> None:
    def look(variable: Any, tx: Any, *_: Any) -> Any:
        root = tx.output.root_tx
        names = {"G": root.f_globals, "L": root.f_locals}
        paths = {
            one.originating_source for one in tx.output.guards if guard_name(one) in ("TENSOR_MATCH", "TYPE_MATCH")
        }
        known: dict[Any, Any] = {}
        found = [(path.get_value(names, {}, {}), value_at(path, names, known)) for path in paths]
        assert all(value_at(path, {}, known) is value for path, (_, value) in zip(paths, found, strict=True))
        return len(found), all(one is other for one, other in found)

    count, same = seen_in_call(look, behind=True)
    assert same
    assert count > 3


def test_guards_are_named_and_can_be_made_anew() -> None:
    def look(variable: Any, tx: Any, *_: Any) -> Any:
        guards = list(tx.output.guards)
        first = next(one for one in guards if guard_name(one) == "NOT_PRESENT_IN_GENERIC_DICT")
        count = len(tx.output.guards)
        tx.output.guards.add(Guard(first.originating_source, partial(first.create_fn.func, **first.create_fn.keywords)))
        return {guard_name(one) for one in guards}, len(tx.output.guards) - count

    names, more = seen_in_call(look, behind=True)
    assert {"TYPE_MATCH", "TENSOR_MATCH", "NOT_PRESENT_IN_GENERIC_DICT"} <= names
    assert more == 1  # which does no harm


def test_dispatch_keys_tell_kinds_of_tensors_apart() -> None:
    assert dispatch_keys(torch.ones(1)) == dispatch_keys(torch.zeros(2))
    assert dispatch_keys(torch.ones(1)) != dispatch_keys(torch.ones(1).to_sparse())


def test_instructions_that_compare_are_found_in_each_translator() -> None:
    names = set(comparisons().values())
    assert {"IS_OP", "CONTAINS_OP", "COMPARE_OP"} == names
    for kind in translators():
        for number, name in comparisons().items():
            assert kind.dispatch_table[number] is getattr(kind, name)


def test_keys_are_made_of_variables() -> None:
    def look(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        [key] = args[3].realize().items
        return type(key) is HashableKey, key.vt.as_python_constant(), issubclass(ModuleVariable, ObjectVariable)

    assert seen_in_call(look) == (True, "y", True)


def test_comparisons_are_calls_of_what_is_built_in() -> None:
    called = []
    plain = BuiltinVariable.call_function

    def call_function(variable: Any, *rest: Any) -> Any:
        called.append(variable.fn)
        return plain(variable, *rest)

    def function(x: Tensor) -> Tensor:
        return x if operator.is_(x, None) else x + 1

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BuiltinVariable, "call_function", call_function)
        torch.compile(function, backend="eager")(torch.ones(1))
    assert operator.is_ in called


def test_hooks_of_all_modules_are_known() -> None:
    assert not hooks_of_all_modules()
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert hooks_of_all_modules()
        handle.remove()
    assert not hooks_of_all_modules()
