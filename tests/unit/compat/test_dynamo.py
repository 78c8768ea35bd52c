"""Names in ``compat/dynamo.py`` have the expected meaning in this torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.compat.compiler import TensorVariable
from lightning_zero.compat.dynamo import (
    ChainedSource,
    CompileContexts,
    ConstantVariable,
    DictVariable,
    Guard,
    HashableKey,
    ListVariable,
    ModuleVariable,
    ObjectVariable,
    TupleVariable,
    VariableBuilder,
    callback_handler,
    comparisons,
    dispatch_keys,
    existed_before,
    guard_name,
    has_changed_before,
    has_global_hooks,
    is_mutated,
    path_in_modules,
    translators,
    value_at,
    wrap_proxy,
)
from lightning_zero.compat.graphs import EXAMPLE_VALUE
from lightning_zero.compile.dynamo_layer_reuse.trace_guards import SourceMap


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
    """Return the result of ``look(variable, tx, args, kwargs)`` in a traced call of the inner module."""
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


def test_mutated_containers_are_found() -> None:
    def look(variable: Any, tx: Any, *_: Any) -> Any:
        effects = tx.output.side_effects
        written = [one for one in effects.id_to_variable.values() if is_mutated(effects, one)]
        stored = {
            name for owner, names in effects.store_attr_mutations.items() if existed_before(owner) for name in names
        }
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


def test_values_at_paths_equal_those_of_torch() -> None:
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


def test_guards_have_names_and_can_be_copied() -> None:
    def look(variable: Any, tx: Any, *_: Any) -> Any:
        guards = list(tx.output.guards)
        first = next(one for one in guards if guard_name(one) == "NOT_PRESENT_IN_GENERIC_DICT")
        count = len(tx.output.guards)
        tx.output.guards.add(Guard(first.originating_source, partial(first.create_fn.func, **first.create_fn.keywords)))
        return {guard_name(one) for one in guards}, len(tx.output.guards) - count

    names, more = seen_in_call(look, behind=True)
    assert {"TYPE_MATCH", "TENSOR_MATCH", "NOT_PRESENT_IN_GENERIC_DICT"} <= names
    assert more == 1  # which does no harm


def test_dispatch_keys_differ_between_kinds_of_tensors() -> None:
    assert dispatch_keys(torch.ones(1)) == dispatch_keys(torch.zeros(2))
    assert dispatch_keys(torch.ones(1)) != dispatch_keys(torch.ones(1).to_sparse())


def test_instructions_that_compare_are_found_in_each_translator() -> None:
    names = set(comparisons().values())
    assert {"IS_OP", "CONTAINS_OP", "COMPARE_OP"} == names
    for kind in translators():
        for number, name in comparisons().items():
            assert kind.dispatch_table[number] is getattr(kind, name)
    assert len(translators()) >= 2


def test_keys_are_made_of_variables() -> None:
    def look(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        [key] = args[3].realize().items
        return type(key) is HashableKey, key.vt.as_python_constant(), issubclass(ModuleVariable, ObjectVariable)

    assert seen_in_call(look) == (True, "y", True)


def test_comparisons_call_builtins() -> None:
    called = []
    kind = torch._dynamo.variables.BuiltinVariable
    plain = kind.call_function

    def call_function(variable: Any, *rest: Any) -> Any:
        called.append(variable.fn)
        return plain(variable, *rest)

    def function(x: Tensor) -> Tensor:
        return x if operator.is_(x, None) else x + 1

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "call_function", call_function)
        torch.compile(function, backend="eager")(torch.ones(1))
    assert operator.is_ in called


def test_global_hooks_are_found() -> None:
    assert not has_global_hooks()
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert has_global_hooks()
        handle.remove()
    assert not has_global_hooks()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.by = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.by


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def seen_in_parts(look: Callable[..., Any], calls: int) -> Any:
    """Return the results of ``look(tx, maps)``, with maps from the first part to the others."""
    found: list[Any] = []
    plain = ModuleVariable.call_function

    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = plain(variable, tx, args, kwargs)
        if isinstance(variable.value, Part) and not _other:
            _other.append(True)
            later = [type(variable.source)(_at(variable.source, number)) for number in (1, 2)]
            found.append(look(tx, [SourceMap(tx, variable.source, other) for other in later]))
        return result

    whole = Parts()
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleVariable, "call_function", call_function)
        compiled = torch.compile(whole, backend="eager", dynamic=None)
        for call in range(calls):
            _other: list[bool] = []
            compiled(torch.ones(2, 3))
            for part in whole.parts:
                part.by = 0.25 + call  # type: ignore[union-attr, assignment]
    return found


def _at(source: Any, number: int) -> Any:
    """Return the path of another part."""
    base = source.base
    return type(base)(base.base, str(number))


def test_a_number_has_changed_before_if_dynamo_says_so() -> None:
    def look(tx: Any, maps: list[Any]) -> Any:
        [number] = {
            guard.originating_source
            for guard in tx.output.guards
            if guard.name.endswith(".by") and guard_name(guard) in ("CONSTANT_MATCH", "TYPE_MATCH")
        }
        paths = [sources.map(number) for sources in maps]
        changed = [has_changed_before(tx, own, at.value(own)) for own, at in zip(paths, maps, strict=True)]
        built = [VariableBuilder(tx, own)(at.value(own)).realize() for own, at in zip(paths, maps, strict=True)]
        return changed, [not one.is_python_constant() for one in built]

    found = seen_in_parts(look, calls=2)
    assert found[0] == ([False, False], [False, False])
    assert found[1] == ([True, True], [True, True])


class Entries:
    """A call whose contexts note when they are entered and left."""

    def __init__(self) -> None:
        self.events: list[str] = []
        torch._dynamo.reset()
        self.compiled = torch.compile(lambda x: x + 1, backend=self._compile, dynamic=False)

    def _compile(self, module: Any, inputs: Any) -> Any:
        self.events.append("compile")
        return module.forward

    @contextmanager
    def context(self) -> Iterator[None]:
        self.events.append("enter")
        try:
            yield
        finally:
            self.events.append("leave")

    def call(self, size: int) -> list[str]:
        self.events.clear()
        with CompileContexts(lambda: [self.context()]):
            self.compiled(torch.ones(size))
            self.events.append("called")
        return list(self.events)


ENTERED = ["enter", "compile", "leave", "called"]


def test_contexts_of_compilations_are_entered_only_by_calls_that_compile() -> None:
    calls = Entries()
    assert [calls.call(2), calls.call(2), calls.call(3), calls.call(2)] == [ENTERED, ["called"], ENTERED, ["called"]]
    torch.compiler.reset()  # removes all callbacks of Dynamo
    assert [calls.call(2), calls.call(2)] == [ENTERED, ["called"]]


def test_compilations_of_other_threads_and_outside_of_calls_enter_no_contexts() -> None:
    inner, calls = Entries(), Entries()
    calls.compiled = lambda x: in_a_thread(lambda: inner.compiled(x))
    assert (calls.call(2), inner.events) == (["called"], ["compile"])
    inner.compiled(torch.ones(3))
    assert inner.events == ["compile"] * 2


def test_contexts_are_left_after_a_failed_compilation() -> None:
    calls = Entries()

    def fail(module: Any, inputs: Any) -> Any:
        raise ValueError("the backend's own")

    calls.compiled = torch.compile(lambda x: x + 1, backend=fail)
    with pytest.raises(Exception, match="the backend's own"):
        calls.call(2)
    assert calls.events == ["enter", "leave"]


def test_contexts_are_left_if_dynamo_reports_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Entries()
    with CompileContexts(list):
        pass  # registers callbacks
    monkeypatch.setattr(callback_handler, "end_callbacks", [])
    assert calls.call(2) == ["enter", "compile", "called", "leave"]


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
