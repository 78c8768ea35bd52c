"""The parts of Dynamo that stand for values while it traces a function, and what it guards of them."""

import dis
import re
from collections.abc import MutableMapping
from enum import Enum
from functools import lru_cache, partial
from types import CodeType
from typing import Any

from torch.nn.modules import module as modules

from lightning_zero.compat.lookup import module, private
from lightning_zero.compat.patches import Patch

symbolic_convert = module("torch._dynamo.symbolic_convert")
constant = module("torch._dynamo.variables.constant")

# A module whose class is the user's: called, its code is followed, unless it is known already what comes of it.
# (torch 2.11+)
ModuleVariable = private("torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable")

# A tuple: what layers return, and are given. (torch 2.11+)
TupleVariable = private("torch._dynamo.variables.TupleVariable")

# A list; what is in it tells whether a layer has written to it. (torch 2.11+)
ListVariable = private("torch._dynamo.variables.ListVariable")

# A dictionary, likewise; its keys are hashable forms of variables. (torch 2.11+)
DictVariable = private("torch._dynamo.variables.ConstDictVariable")

# A number, a text, None: equal ones are the same to a trace. (torch 2.11+)
ConstantVariable = private("torch._dynamo.variables.ConstantVariable")

# An object of a class of the user's; a module is one, too. (torch 2.11+)
ObjectVariable = private("torch._dynamo.variables.UserDefinedObjectVariable")

# A tensor of a class of its own, which is asked for its __torch_function__. (torch 2.11+)
SubclassVariable = private("torch._dynamo.variables.torch_function.TensorWithTFOverrideVariable")

# A function that is built in, its fn; comparisons are calls of it. (torch 2.11+)
BuiltinVariable = private("torch._dynamo.variables.BuiltinVariable")

# What a variable is as a key; torch 2.13 has it elsewhere. (torch 2.11+)
HashableKey = private(
    "torch._dynamo.variables.hashable.HashableTracker", "torch._dynamo.variables.ConstDictVariable._HashableTracker"
)

# Makes one of these of a value that was there before, and an input of the graph, and its guards. (torch 2.11+)
VariableBuilder = private("torch._dynamo.variables.builder.VariableBuilder")

# Makes a variable of a node that was put into the graph, whose value is known. (torch 2.11+)
wrap_proxy = private("torch._dynamo.variables.builder.wrap_fx_proxy")

# The guard that two paths lead to one value; none where one is a global's and the other is not. (torch 2.11+)
guard_of_two_paths = private("torch._dynamo.guards.make_dupe_guard")

# Calls a function while it is traced, whose result stays what it is then: assume_constant_result. (torch 2.11+)
CALLED_AT_ONCE = [
    (private(f"torch._dynamo.variables.{module}"), "invoke_and_store_as_constant")
    for module in ("functions", "nn_module")
]

# Where a value was read: a path, by which a layer's values are found in another one. (torch 2.11+)
Source = private("torch._guards.Source")

# A path that goes on from another, its base. (torch 2.11+)
ChainedSource = private("torch._dynamo.source.ChainedSource")

# One that goes on to the class of what is at its base. (torch 2.11+)
TypeSource = private("torch._dynamo.source.TypeSource")

# What compiled code asks of a value before it runs. (torch 2.11+)
Guard = private("torch._guards.Guard")

# What decides where torch sends an op on a tensor; guards of tensors ask for it. (torch 2.11+)
dispatch_keys = private("torch._C._dispatch_keys")

LAYERS_ONCE = Patch(
    "layers that are alike are traced once by Dynamo",
    {
        # Calls of a module. (torch 2.11+)
        "torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable.call_function": "self, tx, args, kwargs",
        # Values that code gets hold of. (torch 2.11+)
        "torch._dynamo.variables.builder.VariableBuilder.__call__": "self, value",
        # Functions whose results become constants. (torch 2.11+)
        "torch._dynamo.variables.functions.invoke_and_store_as_constant": "tx, fn, name, args, kwargs",
        "torch._dynamo.variables.nn_module.invoke_and_store_as_constant": "tx, fn, name, args, kwargs",
        # Calls of builtins, comparisons among them. (torch 2.11+)
        "torch._dynamo.variables.BuiltinVariable.call_function": "self, tx, args, kwargs",
        # Keys of dictionaries. (torch 2.11+)
        f"{getattr(HashableKey, '__module__', '')}.{getattr(HashableKey, '__qualname__', '')}.__init__": "self, vt",
        # Methods of lists and tuples. (torch 2.11+)
        "torch._dynamo.variables.ListVariable.call_method": "self, tx, name, args, kwargs",
        "torch._dynamo.variables.TupleVariable.call_method": "self, tx, name, args, kwargs",
        # Instructions by their numbers. (torch 2.11+)
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase.dispatch_table": None,
    },
    needs=(
        "torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable",
        "torch._dynamo.variables.TupleVariable",
        "torch._dynamo.variables.ListVariable",
        "torch._dynamo.variables.ConstDictVariable",
        "torch._dynamo.variables.UserDefinedObjectVariable",
        "torch._dynamo.variables.ConstantVariable",
        "torch._dynamo.variables.torch_function.TensorWithTFOverrideVariable",
        "torch._dynamo.variables.BuiltinVariable",
        "torch._dynamo.variables.builder.VariableBuilder",
        "torch._dynamo.variables.builder.wrap_fx_proxy",
        "torch._dynamo.guards.make_dupe_guard",
        "torch._dynamo.source.TypeSource",
        "torch._guards.Guard",
        "torch._C._dispatch_keys",
    ),
)


def guard_name(guard: Any) -> str:
    """The name of what it asks, a method of torch's GuardBuilder."""
    how = guard.create_fn
    return str((how.func if isinstance(how, partial) else how).__name__)


def translators() -> list[Any]:
    """Classes that go through bytecode, whose dispatch_table has a method for each instruction, by its number."""
    # What they all derive from. (torch 2.11+)
    found = [symbolic_convert.InstructionTranslatorBase]
    for kind in found:
        found += kind.__subclasses__()
    return found


def comparisons() -> dict[int, str]:
    """Instructions that compare two values, the upmost on the stack, by their numbers."""
    return {dis.opmap[name]: name for name in ("IS_OP", "COMPARE_OP", "CONTAINS_OP")}


def hooks_of_all_modules() -> bool:
    """Whether there are hooks that calls of all modules run."""
    # By their handles' ids, before, behind and in backward. (torch 2.11+)
    all_of_them = (
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        modules._global_backward_hooks,
        modules._global_backward_pre_hooks,
    )
    return any(all_of_them)


def is_constant(variable: Any) -> bool:
    """Whether it stands for what there is once: a number, a text, a member of an Enum."""
    # Of a class of their own in torch up to 2.12; later such members are objects like others. (torch 2.11+)
    kinds = ConstantVariable, getattr(constant, "EnumVariable", ConstantVariable)
    return isinstance(variable, kinds) or (isinstance(variable, ObjectVariable) and isinstance(variable.value, Enum))


def was_there(variable: Any) -> bool:
    """Whether it stands for an object that was there before the trace."""
    return variable.mutation_type is not None and "Existing" in type(variable.mutation_type).__name__


def is_written(effects: Any, variable: Any) -> bool:
    """Whether it stands for a container that was there before the trace, to which Dynamo will write back."""
    return was_there(variable) and variable not in effects.store_attr_mutations and effects.is_modified(variable)


def path_in_modules(variable: Any) -> str:
    """A module's path as nodes note it in which it was called."""
    name = variable.get_nn_module_stack_source().name
    return re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", name)


def known_by(builder: Any, value: Any) -> Any:
    """What a builder of variables would return of a value that has been met before, by whatever path; or None."""
    return builder.tx.output.side_effects.id_to_variable.get(id(value))


def value_at(path: Any, names: dict[str, Any], known: MutableMapping[Any, Any]) -> Any:
    """What is at a path, as ``path.get_value`` has it, which compiles the text of each step each time.

    Args:
        names: what paths begin with.
        known: of paths that have been read, their values.
    """
    if path not in known:
        # Code of the last step, which names what it goes on from. (torch 2.11+)
        text = path._name_template
        chained = isinstance(path, ChainedSource)
        step = {"_before": value_at(path.base, names, known)} if chained else {}
        known[path] = eval(_code(text.format("_before") if chained else text), names, step)
    return known[path]


@lru_cache(4096)
def _code(text: str) -> CodeType:
    return compile(text, "<path>", "eval")
