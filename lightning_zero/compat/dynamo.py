"""Parts of Dynamo: variables of values in traced code, sources, guards, and recompile limits."""

from __future__ import annotations

import dis
import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from functools import lru_cache, partial
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules import module as modules

from lightning_zero.compat.compiler import dynamo_config
from lightning_zero.compat.lookup import module, private
from lightning_zero.compat.patches import Patch

constant = module("torch._dynamo.variables.constant")
convert_frame = module("torch._dynamo.convert_frame")
pgo = module("torch._dynamo.pgo")
symbolic_convert = module("torch._dynamo.symbolic_convert")

# A module of a user's class. Its code is traced when it is called. (torch 2.11+)
ModuleVariable = private("torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable")

# A tuple, such as the result of a layer. (torch 2.11+)
TupleVariable = private("torch._dynamo.variables.TupleVariable")

# A list; its items show if a layer has written to it. (torch 2.11+)
ListVariable = private("torch._dynamo.variables.ListVariable")

# A dictionary; its keys are hashable wrappers of variables. (torch 2.11+)
DictVariable = private("torch._dynamo.variables.ConstDictVariable")

# Compiles a dimension of an argument for any size, if the code allows that. (torch 2.11+)
mark_dynamic = private("torch._dynamo.maybe_mark_dynamic")

# A number, a text or None; equal values are interchangeable in a trace. (torch 2.11+)
ConstantVariable = private("torch._dynamo.variables.ConstantVariable")

# An object of a user's class, including modules. (torch 2.11+)
ObjectVariable = private("torch._dynamo.variables.UserDefinedObjectVariable")

# A symbolic size. (torch 2.11+)
SizeVariable = private("torch._dynamo.variables.SymNodeVariable")

# A tensor of a class with __torch_function__. (torch 2.11+)
SubclassVariable = private("torch._dynamo.variables.torch_function.TensorWithTFOverrideVariable")

# Wraps a variable as a key; moved in torch 2.13. (torch 2.11+)
HashableKey = private(
    "torch._dynamo.variables.hashable.HashableTracker", "torch._dynamo.variables.ConstDictVariable._HashableTracker"
)

# Makes a variable, an input of the graph and guards of a value that existed before the trace. (torch 2.11+)
VariableBuilder = private("torch._dynamo.variables.builder.VariableBuilder")

# Makes a variable of a node whose value is known. (torch 2.11+)
wrap_proxy = private("torch._dynamo.variables.builder.wrap_fx_proxy")

# Returns the guard that two sources are one value, or None if only one of them is a global. (torch 2.11+)
guard_of_two_paths = private("torch._dynamo.guards.make_dupe_guard")

# The path of a value from the frame's locals and globals. (torch 2.11+)
Source = private("torch._guards.Source")

# A source that continues another one, its base. (torch 2.11+)
ChainedSource = private("torch._dynamo.source.ChainedSource")

# A condition that compiled code checks before it runs. (torch 2.11+)
Guard = private("torch._guards.Guard")

# The keys that decide which kernel an op on a tensor calls; guards of tensors check them. (torch 2.11+)
dispatch_keys = private("torch._C._dispatch_keys")

# The trace of a function. (torch 2.11+)
InstructionTranslator = private("torch._dynamo.symbolic_convert.InstructionTranslator")

# Functions that sources may call. (torch 2.11+)
closure_vars = private("torch._dynamo.guards._get_closure_vars")

LAYER_REUSE = Patch(
    "Dynamo traces equal layers once",
    {
        # Calls a module. (torch 2.11+)
        "torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable.call_function": "self, tx, args, kwargs",
        # Makes a variable of a value that code reads. (torch 2.11+)
        "torch._dynamo.variables.builder.VariableBuilder.__call__": "self, value",
        # Call functions whose results are constants. (torch 2.11+)
        "torch._dynamo.variables.functions.invoke_and_store_as_constant": "tx, fn, name, args, kwargs",
        "torch._dynamo.variables.nn_module.invoke_and_store_as_constant": "tx, fn, name, args, kwargs",
        # Calls a builtin, such as a comparison. (torch 2.11+)
        "torch._dynamo.variables.BuiltinVariable.call_function": "self, tx, args, kwargs",
        # Makes a key of a dictionary. (torch 2.11+)
        f"{getattr(HashableKey, '__module__', '')}.{getattr(HashableKey, '__qualname__', '')}.__init__": "self, vt",
        # Call methods of lists and tuples. (torch 2.11+)
        "torch._dynamo.variables.ListVariable.call_method": "self, tx, name, args, kwargs",
        "torch._dynamo.variables.TupleVariable.call_method": "self, tx, name, args, kwargs",
        # The methods for instructions, by opcode. (torch 2.11+)
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase.dispatch_table": None,
    },
    needs={
        "torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable": None,
        "torch._dynamo.variables.TupleVariable": None,
        "torch._dynamo.variables.ListVariable": None,
        "torch._dynamo.variables.ConstDictVariable": None,
        "torch._dynamo.variables.UserDefinedObjectVariable": None,
        "torch._dynamo.variables.ConstantVariable": None,
        "torch._dynamo.variables.torch_function.TensorWithTFOverrideVariable": None,
        "torch._dynamo.variables.SymNodeVariable": None,
        "torch._dynamo.variables.BuiltinVariable": None,
        "torch._dynamo.variables.builder.VariableBuilder": None,
        "torch._dynamo.variables.builder.wrap_fx_proxy": "tx, proxy, example_value, subclass_type, **options",
        "torch._dynamo.guards.make_dupe_guard": "obj_source, dupe_source",
        "torch._guards.Guard": None,
        "torch._C._dispatch_keys": None,
    },
)


def guard_name(guard: Any) -> str:
    """Return the name of the guard's condition, a method of torch's GuardBuilder."""
    how = guard.create_fn
    return str((how.func if isinstance(how, partial) else how).__name__)


def translators() -> list[Any]:
    """Return the classes that trace bytecode, without their base class; each has a dispatch_table."""
    found = symbolic_convert.InstructionTranslatorBase.__subclasses__()
    for kind in found:  # grows in the loop
        found += kind.__subclasses__()
    return list(found)


def comparisons() -> dict[int, str]:
    """Return the instructions that compare the two topmost values of the stack, by opcode."""
    return {dis.opmap[name]: name for name in ("IS_OP", "COMPARE_OP", "CONTAINS_OP")}


# Calls functions before and after each compilation, on the thread that compiles and under Dynamo's lock. (torch 2.11+)
callback_handler = private("torch._dynamo.callback.callback_handler")

_thread = threading.local()  # .contexts: the innermost CompileContexts of this thread


class CompileContexts:
    """Contexts for the compilations of a call, as a context for the call.

    Most calls compile nothing, so that they do not enter these contexts.
    """

    __slots__ = ("_before", "_entered", "_make")

    def __init__(self, make: Callable[[], Iterable[AbstractContextManager[Any]]]) -> None:
        self._make = make
        self._entered: ExitStack | None = None

    def __enter__(self) -> None:
        self._before = getattr(_thread, "contexts", None)
        _thread.contexts = self
        if _begin_compilation not in callback_handler.start_callbacks:  # torch.compiler.reset() removes it
            callback_handler.register_start_callback(_begin_compilation)
            callback_handler.register_end_callback(_end_compilation)

    def __exit__(self, *_: object) -> None:
        _thread.contexts = self._before
        self.end()  # Dynamo reports no end if another thread still compiles

    def begin(self) -> None:
        """Enter the contexts."""
        self.end()
        with ExitStack() as stack:
            for context in self._make():
                stack.enter_context(context)
            self._entered = stack.pop_all()

    def end(self) -> None:
        """Leave the contexts, if they are entered."""
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.close()


def _begin_compilation(_: Any) -> None:
    contexts = getattr(_thread, "contexts", None)
    if contexts is not None:
        contexts.begin()


def _end_compilation(_: Any) -> None:
    contexts = getattr(_thread, "contexts", None)
    if contexts is not None:
        contexts.end()


def has_global_hooks() -> bool:
    """Return True if there are hooks for calls of all modules."""
    # By the ids of their handles. (torch 2.11+)
    return any(
        (
            modules._global_forward_hooks,
            modules._global_forward_pre_hooks,
            modules._global_backward_hooks,
            modules._global_backward_pre_hooks,
        )
    )


def is_constant(variable: Any) -> bool:
    """Return True for a number, a text, or a member of an Enum."""
    # Torch up to 2.12 has a class for members of an Enum; later ones are objects. (torch 2.11+)
    kinds = ConstantVariable, getattr(constant, "EnumVariable", ConstantVariable)
    return isinstance(variable, kinds) or (isinstance(variable, ObjectVariable) and isinstance(variable.value, Enum))


def existed_before(variable: Any) -> bool:
    """Return True if the object existed before the trace."""
    return variable.mutation_type is not None and "Existing" in type(variable.mutation_type).__name__


def is_mutated(effects: Any, variable: Any) -> bool:
    """Return True for an older container that Dynamo will update after the graph."""
    return existed_before(variable) and variable not in effects.store_attr_mutations and effects.is_modified(variable)


def path_in_modules(variable: Any) -> str:
    """Return the path of a module as nodes note it in their module stack."""
    name = variable.get_nn_module_stack_source().name
    return re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", name)


def known_variable(variable_builder: Any, value: Any) -> Any:
    """Return the variable of a value that the trace has read before, by any path, or None."""
    return variable_builder.tx.output.side_effects.id_to_variable.get(id(value))


def value_at(path: Any, names: dict[str, Any], known: MutableMapping[Any, Any]) -> Any:
    """Return the value at a path.

    Faster than ``path.get_value``, which compiles the text of each step every time.
    """
    if path not in known:
        # The code of the last step, with a placeholder for the base. (torch 2.11+)
        text = path._name_template
        chained = isinstance(path, ChainedSource)
        step = {"_before": value_at(path.base, names, known)} if chained else {}
        known[path] = eval(_compile_step(text.format("_before") if chained else text), names, step)
    return known[path]


@lru_cache(4096)
def _compile_step(text: str) -> CodeType:
    return compile(text, "<path>", "eval")


def has_changed_before(tx: Any, path: Any, number: float) -> bool:
    """Return True if the number had another value at an earlier compilation.

    Dynamo makes it an input then. Records the number for later compilations.
    """
    # Numbers are recorded by the outermost code object and by path. (torch 2.11+)
    make: Any = pgo.FrameStateSizeEntry.make_scalar
    entry = pgo.process_automatic_dynamic(tx.output.root_tx, path.name, make(number))
    if dynamo_config.specialize_float or not math.isfinite(number):
        return False  # remains a constant
    return entry.scalar is pgo.auto_dynamic or not dynamo_config.assume_static_by_default


class LimitHit(NamedTuple):
    """Dynamo's report about code that it no longer compiles.

    Attributes:
        limit: name of the setting in ``torch._dynamo.config``.
        value: of the setting.
        code: name, file and line of the function.
        guard: the guard that failed last.
    """

    limit: str
    value: int
    code: str
    guard: str


@contextmanager
def watch_recompile_limits(notice: Callable[[LimitHit], None]) -> Iterator[None]:
    """Call ``notice`` when Dynamo reaches a limit of recompilations, in place of Dynamo's warning."""

    # The message that Dynamo logs contains "hit config.". (torch 2.11+)
    def filter_record(record: logging.LogRecord) -> bool:
        if "hit config." not in str(record.msg) or not isinstance(record.args, tuple) or len(record.args) < 4:
            return True
        limit, value, code, guard, *_ = record.args
        notice(LimitHit(str(limit), int(str(value)), str(code), str(guard)))
        return False

    convert_frame.log.addFilter(filter_record)
    try:
        yield
    finally:
        convert_frame.log.removeFilter(filter_record)


_INTS = Patch(
    "an int attribute of a module that changes in each step costs one recompilation",
    {
        # Decides if an int is a constant. (torch 2.11+)
        "torch._dynamo.variables.builder.is_int_specialization_case": "value, source",
    },
)


class ChangingInts:
    """Makes an int attribute of a module an input of its graph after the attribute has changed.

    Dynamo treats ints of modules as constants, and recompiles for each value of a counter until a limit. Its setting
    ``allow_unspec_int_on_nn_module`` applies to all modules, so layer numbers and sizes would become symbols, too. Here
    an attribute has changed if the same module had another value at an earlier compilation.
    """

    def __init__(self) -> None:
        self._values: MutableMapping[nn.Module, dict[str, int]] = WeakKeyDictionary()
        self._changed: MutableMapping[nn.Module, set[str]] = WeakKeyDictionary()

    @_INTS
    @contextmanager
    def mark_as_inputs(self) -> Iterator[None]:
        """Have Dynamo compile so inside."""

        def make(plain: Callable[..., bool]) -> Callable[..., bool]:
            return lambda value, source: plain(value, source) and not self._has_changed(value, source)

        with _INTS.replace({"is_int_specialization_case": make}):
            yield

    def _has_changed(self, value: Any, source: Any) -> bool:
        if type(value) is not int or not source.guard_source.is_unspecialized_nn_module():
            return False
        owner, name = _find_owner(source)
        if not isinstance(owner, nn.Module) or name.startswith("_zero_"):
            return False
        before = self._values.setdefault(owner, {}).setdefault(name, value)
        if before != value:
            self._changed.setdefault(owner, set()).add(name)
        return name in self._changed.get(owner, ())


def _find_owner(source: Any) -> tuple[Any, str]:
    """Return the owner and the name of the attribute that ``source`` reads; None for other sources."""
    base: Any = getattr(source, "base", None)
    name = getattr(source, "member", None)
    if name is None and getattr(base, "member", None) == "__dict__":
        base, name = base.base, getattr(source, "index", None)
    if base is None or not isinstance(name, str):
        return None, ""
    try:
        root = InstructionTranslator.current_tx().output.root_tx
        return value_at(base, {**closure_vars(), "L": root.f_locals, "G": root.f_globals}, {}), name
    except (AttributeError, KeyError, IndexError, NameError, NotImplementedError):
        return None, ""
