"""Inputs that ``compat/graph_inputs.py`` puts into a graph are those that Dynamo would, in all that it notes of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.compat.dynamo import ModuleVariable, VariableBuilder, guard_name
from lightning_zero.compat.graph_inputs import MARK, has_changed_before, input_like
from lightning_zero.compat.graphs import EXAMPLE_VALUE, NN_MODULE_STACK, GRAPH_ARG, STACK_TRACE
from lightning_zero.compile.dynamo_layer_reuse.sources import Moved

# What is of each input alone: its path, also in a cache, its node, its kind of changes, and the line that read it.
OWN = ("source", "tensor_source", "shape_env_to_source_to_symbol_cache", "proxy", "mutation_type", "source_location")


class Part(nn.Module):
    def __init__(self, kind: type[nn.Parameter] = nn.Parameter) -> None:
        super().__init__()
        self.weight = kind(torch.arange(6.0).view(2, 3))
        self.by = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.by


class Special(nn.Parameter):
    pass


class Whole(nn.Module):
    def __init__(self, kind: type[nn.Parameter] = nn.Parameter) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(kind) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def seen(look: Callable[..., Any], whole: Whole | None = None, dynamic: bool | None = False, calls: int = 1) -> Any:
    """What ``look(tx, path, moved)`` says behind the call of the first part: a path to its weight, and paths from it to
    the second part and to the third one."""
    found: list[Any] = []
    plain = ModuleVariable.call_function

    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = plain(variable, tx, args, kwargs)
        if isinstance(variable.value, Part) and not _other:
            _other.append(True)
            path = next(path for path in tx.output.input_source_to_var if path.name.endswith("['weight']"))
            later = [type(variable.source)(_at(variable.source, number)) for number in (1, 2)]
            found.append(look(tx, path, [Moved(tx, variable.source, other) for other in later]))
        return result

    whole = whole or Whole()
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleVariable, "call_function", call_function)
        compiled = torch.compile(whole, backend="eager", dynamic=dynamic)
        for call in range(calls):
            _other: list[bool] = []
            compiled(torch.ones(2, 3))
            for part in whole.parts:
                part.by = 0.25 + call  # type: ignore[union-attr, assignment]
    return found


def _at(source: Any, number: int) -> Any:
    """The path of another part."""
    base = source.base
    return type(base)(base.base, str(number))


def state(tx: Any, path: Any, value: Tensor, node: Any) -> dict[str, Any]:
    """All that Dynamo knows of an input."""
    output, variable = tx.output, tx.output.input_source_to_var[path]
    known = {name: it for name, it in vars(variable).items() if name not in OWN}
    meta = {name: it for name, it in node.meta.items() if name not in (EXAMPLE_VALUE, GRAPH_ARG, NN_MODULE_STACK, STACK_TRACE)}
    tracked = [fake for fake in output.tracked_fakes if fake.source == path]
    context = output.tracing_context.tensor_to_context[value]
    fake = node.meta[EXAMPLE_VALUE]
    return {
        "variable": (type(variable), known, type(variable.mutation_type), variable.source == path),
        "found": output.variable_tracker_cache[path] is variable is output.side_effects.id_to_variable[id(value)],
        "kept": any(it is value for it in output.side_effects.keepalive),
        "meta": meta,
        "origin": (type(node.meta[GRAPH_ARG]), node.meta[GRAPH_ARG].source == path, node.meta[GRAPH_ARG].example is value),
        "fake": (node.meta[GRAPH_ARG].fake_tensor is fake, fake.shape, fake.requires_grad, isinstance(fake, nn.Parameter)),
        "memory": output.fake_mode.fake_tensor_converter._get_memo(value) is fake,
        "tracked": [(it.fake is fake, it.symbolic_context is context) for it in tracked],
        "paths": [it == path for it in output.tracked_fakes_id_to_source[id(value)]],
        "context": {one.name: getattr(context, one.name) for one in fields(context) if one.name not in OWN},
        "sizes": output.input_source_to_sizes_strides[path],
        "type": node.type,
        "names": (output.root_tracer.input_name_to_proxy[node.target].node is node, node.name in _used(output)),
        "mark": vars(value).get(MARK),
        "behind": node.next.op if node.next.op == "placeholder" else "all inputs",
    }


def _used(output: Any) -> Any:
    return output.root_tracer._used_names


@pytest.mark.parametrize("kind", [nn.Parameter, Special])
def test_an_input_is_made_as_dynamo_makes_it(kind: type[nn.Parameter]) -> None:
    def look(tx: Any, path: Any, moved: list[Any]) -> Any:
        like = tx.output.input_source_to_var[path].as_proxy().node
        states, counts = [], []
        for paths, by_hand in zip(moved, (False, True), strict=True):
            own = paths.to(path)
            value = paths.value(own)
            before = len(tx.output.tracked_fakes), len(tx.output.root_tracer._input_versions_at_beginning)
            node = input_like(tx, own, value, like) if by_hand else VariableBuilder(tx, own)(value).as_proxy().node
            after = len(tx.output.tracked_fakes), len(tx.output.root_tracer._input_versions_at_beginning)
            counts.append([one - other for one, other in zip(after, before, strict=True)])
            states.append(state(tx, own, value, node))
            assert VariableBuilder(tx, own)(value).as_proxy().node is node
            assert input_like(tx, own, value, like) is None
        assert "create_proxy" not in vars(tx.output.root_tracer)
        return states, counts

    [(states, counts)] = seen(look, Whole(kind))
    assert states[0] == states[1]
    assert counts[0] == counts[1] == [1, 1]


def of_another_dtype(weight: Any) -> None:
    weight.data = weight.data.double()


def frozen(weight: Any) -> None:
    weight.requires_grad_(False)


def of_another_size(weight: Any) -> None:
    weight.data = weight.data[:1]


def transposed(weight: Any) -> None:
    weight.data = weight.data.t().contiguous().t()


def of_another_class(weight: Any) -> None:
    weight.__class__ = Special


def marked(weight: Any) -> None:
    torch._dynamo.mark_static_address(weight, guard=True)


def dynamic(weight: Any) -> None:
    torch._dynamo.maybe_mark_dynamic(weight, 1)


@pytest.mark.parametrize(
    "change", [of_another_dtype, frozen, of_another_size, transposed, of_another_class, marked, dynamic]
)
def test_what_is_not_alike_is_left_to_dynamo(change: Callable[[Any], None]) -> None:
    whole, found = Whole(), []

    def look(tx: Any, path: Any, moved: list[Any]) -> None:
        node = tx.output.input_source_to_var[path].as_proxy().node
        weight: Any = whole.parts[1].weight
        found.append(input_like(tx, moved[1].to(path), whole.parts[2].weight, node) is None)  # type: ignore[arg-type]
        change(weight)
        inputs = len(tx.output.input_source_to_var)
        found.append(input_like(tx, moved[0].to(path), weight, node) is None)
        found.append(len(tx.output.input_source_to_var) == inputs)

    with suppress(Exception):  # what has been changed in the middle of it may not compile
        seen(look, whole)
    assert found == [False, True, True]


def test_an_input_comes_with_no_guard_of_its_own() -> None:
    def look(tx: Any, path: Any, moved: list[Any]) -> Any:
        own = moved[1].to(path)
        node = tx.output.input_source_to_var[path].as_proxy().node
        input_like(tx, own, moved[1].value(own), node)
        return [guard_name(guard) for guard in tx.output.guards if guard.originating_source == own]

    assert seen(look) == [[]]


def test_numbers_have_changed_before_where_dynamo_finds_that_they_have() -> None:
    def look(tx: Any, path: Any, moved: list[Any]) -> Any:
        [number] = {
            guard.originating_source
            for guard in tx.output.guards
            if guard.name.endswith(".by") and guard_name(guard) in ("CONSTANT_MATCH", "TYPE_MATCH")
        }
        paths = [paths.to(number) for paths in moved]
        by_hand = [has_changed_before(tx, own, paths.value(own)) for own, paths in zip(paths, moved, strict=True)]
        built = [VariableBuilder(tx, own)(at.value(own)).realize() for own, at in zip(paths, moved, strict=True)]
        return by_hand, [not one.is_python_constant() for one in built]

    found = seen(look, dynamic=None, calls=2)
    assert found[0] == ([False, False], [False, False])
    assert found[1] == ([True, True], [True, True])
