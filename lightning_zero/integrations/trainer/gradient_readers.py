"""Find user code that may read gradients, or need them after the optimizer step.

Gradients that alias compute shards are rounded to bfloat16, and are gone after the step. The strategy chooses that by
itself only if :func:`may_read_gradients` returns False. It scans names in the code of the module and of the callbacks,
and reports a reader if in doubt.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cached_property, partial
from types import CodeType
from typing import Any

import lightning.pytorch as pl

# Packages whose hooks do not read gradients.
PACKAGES = ("lightning", "pytorch_lightning", "lightning_zero", "lightning_utilities", "torch", "builtins", "abc")
# Hooks that run while gradients wait for the step. They may read gradients by any helper.
BEFORE_STEP = frozenset({"on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"})
# Names of code that may step again, or between backward and step.
OWN_STEPS = frozenset({"backward", "manual_backward", "step"})
# Parts of the names of what has a step() of its own, and of optimizers that have such a part, too.
STEPPED = ("prof", "sched", "sch")
OPTIMIZERS = ("opt", "free")
# Names of functions that take the name of an attribute.
BY_NAME = frozenset({"getattr", "methodcaller", "attrgetter"})
# Names that contain "grad", and of code that reads no gradient.
HARMLESS = frozenset(
    {
        *("no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad", "requires_grad_"),
        *("grad_fn", "zero_grad", "optimizer_zero_grad", "accumulate_grad_batches", "GradScaler"),
        *("gradient_clip_val", "gradient_clip_algorithm", "gradient_checkpointing", "gradient_checkpointing_enable"),
    }
)


def may_read_gradients(trainer: pl.Trainer) -> bool:
    """Return True if the module or a callback may read gradients, or if single elements are clipped."""
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value":
        return True
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(map(_reads, (trainer.lightning_module, *callbacks)))


def _reads(hooks: object) -> bool:
    functions = {name: value for cls in _own_classes(type(hooks)) for name, value in vars(cls).items()}
    own = {
        name: value for name, value in vars(hooks).items() if hasattr(value, "__code__") or isinstance(value, partial)
    }
    if "step" in own:  # perhaps the optimizer's
        return True
    # After a first training, the compiled call is an attribute.
    functions |= {name: value for name, value in own.items() if not _is_of_packages(value)}
    return any(
        name in BEFORE_STEP or any(map(_is_of_gradients, _names(code)))
        for name, value in functions.items()
        for code in _codes(value)
    )


def _own_classes(cls: type) -> Iterator[type]:
    """Yield the classes that other packages than Lightning, torch and this one define."""
    return (base for base in cls.__mro__ if not _is_of_packages(base))


def _is_of_packages(value: Any) -> bool:
    return (value.__module__ or "").split(".")[0] in PACKAGES  # None for functions of exec()


def _codes(value: Any) -> Iterator[CodeType]:
    names = "__func__", "fget", "__wrapped__"
    functions = [value, *(getattr(value, name, None) for name in names)]
    if isinstance(value, partial | cached_property):
        functions.append(value.func)
    for function in functions:
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            yield code


def _names(code: CodeType) -> Iterator[str]:
    harmless = "step" in code.co_names and _steps_of_others(code)
    yield from (name for name in (*code.co_names, *code.co_freevars) if name != "step" or not harmless)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif constant == "grad" or (constant == "step" and BY_NAME.intersection(code.co_names)):
            yield constant


def _steps_of_others(code: CodeType) -> bool:
    """Return True if each ``step`` is an attribute of ``self``, a profiler or a scheduler."""
    receiver: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.argval == "step" and not instruction.opname.startswith(("STORE", "LOAD_FAST")):
            is_attribute = "ATTR" in instruction.opname or "METHOD" in instruction.opname
            # The receiver of a jump target is one of several.
            if not is_attribute or instruction.is_jump_target or not _has_own_step(receiver):
                return False
        if instruction.opname not in ("CACHE", "PUSH_NULL", "COPY", "DUP_TOP"):
            receiver = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
    return True


def _has_own_step(receiver: Any) -> bool:
    if not isinstance(receiver, str) or any(part in receiver for part in OPTIMIZERS):
        return False
    return receiver == "self" or any(part in receiver for part in STEPPED)


def _is_of_gradients(name: str) -> bool:
    return name in OWN_STEPS or ("grad" in name and name not in HARMLESS)
