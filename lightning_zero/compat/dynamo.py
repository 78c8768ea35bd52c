"""The parts of Dynamo that stand for values while it traces a function, and what it guards of them."""

import dis
import re
import sys
from collections.abc import MutableMapping
from enum import Enum
from functools import lru_cache, partial
from types import CodeType
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import source, symbolic_convert, variables
from torch._dynamo.variables import builder, constant, nn_module, torch_function
from torch.nn.modules import module as modules

# A module whose class is the user's: called, its code is followed, unless it is known already what comes of it.
# (torch 2.11+)
ModuleVariable: Any = nn_module.UnspecializedNNModuleVariable

# A tuple: what layers return, and are given. (torch 2.11+)
TupleVariable = variables.TupleVariable

# A list; what is in it tells whether a layer has written to it. (torch 2.11+)
ListVariable = variables.ListVariable

# A dictionary, likewise; its keys are hashable forms of variables. (torch 2.11+)
DictVariable = variables.ConstDictVariable

# A number, a text, None: equal ones are the same to a trace. (torch 2.11+)
ConstantVariable = variables.ConstantVariable

# An object of a class of the user's; a module is one, too. (torch 2.11+)
ObjectVariable = variables.UserDefinedObjectVariable

# A tensor of a class of its own, which is asked for its __torch_function__. (torch 2.11+)
SubclassVariable = torch_function.TensorWithTFOverrideVariable

# A function that is built in, its fn; comparisons are calls of it. (torch 2.11+)
BuiltinVariable: Any = variables.BuiltinVariable

# What a variable is as a key; torch 2.13 has it elsewhere. (torch 2.11+)
HashableKey: Any = (
    getattr(variables.ConstDictVariable, "_HashableTracker", None)
    or sys.modules["torch._dynamo.variables.hashable"].HashableTracker
)

# Makes one of these of a value that was there before, and an input of the graph, and its guards. (torch 2.11+)
VariableBuilder = builder.VariableBuilder

# Makes a variable of a node that was put into the graph, whose value is known. (torch 2.11+)
wrap_proxy = builder.wrap_fx_proxy

# The guard that two paths lead to one value; none where one is a global's and the other is not. (torch 2.11+)
guard_of_two_paths = torch._dynamo.guards.make_dupe_guard

# Calls a function while it is traced, whose result stays what it is then: assume_constant_result. (torch 2.11+)
CALLED_AT_ONCE = [
    (module, "invoke_and_store_as_constant") for module in (sys.modules["torch._dynamo.variables.functions"], nn_module)
]

# Where a value was read: a path, by which a layer's values are found in another one. (torch 2.11+)
Source = torch._guards.Source

# A path that goes on from another, its base. (torch 2.11+)
ChainedSource = source.ChainedSource

# One that goes on to the class of what is at its base. (torch 2.11+)
TypeSource = source.TypeSource

# What compiled code asks of a value before it runs. (torch 2.11+)
Guard = torch._guards.Guard

# What decides where torch sends an op on a tensor; guards of tensors ask for it. (torch 2.11+)
dispatch_keys = torch._C._dispatch_keys


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
