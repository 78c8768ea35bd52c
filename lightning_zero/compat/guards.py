"""How Dynamo looks at values while it builds guards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_zero.compat.dynamo import Source, value_at
from lightning_zero.compat.lookup import module
from lightning_zero.compat.patches import Patch, swap_attribute
from lightning_zero.compat.settings import ReadOnce

guards = module("torch._dynamo.guards")

__all__ = ["values_read_once"]

_VALUES = Patch(
    "Dynamo reads each value once for all guards of a graph",
    {
        # Finds values for guards; a builder is made for each graph. (torch 2.11+)
        "torch._dynamo.guards.GuardBuilder.get": "self, guard_or_source, closure_vars",
        # Makes all guards of a graph. (torch 2.11+)
        "torch._dynamo.guards.CheckFunctionManager.__init__": (
            "self, f_code, output_graph, cache_entry, guard_fail_fn, guard_filter_fn, shape_code_parts, "
            "runtime_global_scope, save_guards, strict_error",  # torch 2.11
            "self, f_code, output_graph, cache_entries, guard_fail_fn, guard_filter_fn, shape_code_parts, "
            "runtime_global_scope, save_guards, strict_error",
            "self, f_code, output_graph, cache_entries, guard_fail_fn, guard_filter_fn, shape_code_parts, "
            "runtime_global_scope, save_guards, strict_error, guard_build_local_state",
        ),
        # The module that guards read Dynamo's settings from. (torch 2.11+)
        "torch._dynamo.guards.config": None,
    },
    needs=(
        # The functions that a source's path may call. (torch 2.11+)
        "torch._dynamo.guards._get_closure_vars",
    ),
)


@_VALUES
@contextmanager
def values_read_once() -> Iterator[None]:
    """Inside, it reads each value, and each setting, once for all guards of a graph. By itself it looks for the value
    at a path in a weak dictionary, by way of three calls, and 1,300 times for each layer of GPT-2, and compiles the
    text of each step."""
    builder: Any = guards.GuardBuilder
    plain = builder.get
    read: dict[Any, _Values] = {}

    def get(self: Any, guard_or_source: Any, closure_vars: Any = None) -> Any:
        if closure_vars is not None:
            return plain(self, guard_or_source, closure_vars)
        values = read.get(self)
        if values is None:
            values = read[self] = _Values({**guards._get_closure_vars(), **self.scope})
        return values[guard_or_source if isinstance(guard_or_source, Source) else guard_or_source.originating_source]

    manager: Any = guards.CheckFunctionManager
    made = manager.__init__

    def make(self: Any, *args: Any, **named: Any) -> None:
        with swap_attribute(guards, "config", ReadOnce(guards.config)):
            made(self, *args, **named)

    with swap_attribute(builder, "get", get), swap_attribute(manager, "__init__", make):
        yield


class _Values:
    """Of paths, equal ones of which are often several objects.

    Args:
        names: what paths begin with, and call.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._by_path: dict[Any, Any] = {}
        self._by_object: dict[int, tuple[Any, Any]] = {}  # with the path, whose number nobody else may get

    def __getitem__(self, path: Any) -> Any:
        found = self._by_object.get(id(path))
        if found is None:
            found = self._by_object[id(path)] = path, value_at(path, self._names, self._by_path)
        return found[1]
