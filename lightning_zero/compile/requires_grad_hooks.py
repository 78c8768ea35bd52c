"""Hooks that only have a module's output ask for gradients, as transformers and PEFT put on a frozen embedding once
layers are checkpointed (``enable_input_require_grads``).

Reentrant checkpoints need that; others do not, and neither does compiled code, whatever it checkpoints. Dynamo cannot
trace ``requires_grad_()`` of what a graph computes: it gave up every frame around the embedding, one after the other,
which took minutes, and left graphs in pieces. So compiled code goes without these hooks, unless what they ask for is
seen: by a reentrant checkpoint, some of whose parts may stay eager, or because the output is handed to the caller.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from lightning_zero.compat.compiler import dynamo_config
from lightning_zero.compat.tensors import tree_leaves

__all__ = ["asking", "left_out", "output_needs_hooks"]

ARGUMENTS = 3  # module, its arguments, its output
# Instructions of Python 3.11 to 3.14 that load a local variable and that call a method.
LOADS = {"LOAD_FAST", "LOAD_FAST_BORROW"}
CALLING = {"RESUME", "LOAD_METHOD", "LOAD_ATTR", "LOAD_CONST", "KW_NAMES", "PRECALL", "CALL", "CALL_KW"}
CALLING |= {"POP_TOP", "RETURN_VALUE", "RETURN_CONST"}


def asking(hooks: Iterable[Mapping[int, Any]]) -> list[FunctionType]:
    """Those of the hooks that do nothing but call ``requires_grad_()`` of an output."""
    return [hook for some in hooks for hook in some.values() if _only_asks(hook)]


def _only_asks(hook: Any) -> bool:
    if not isinstance(hook, FunctionType):
        return False
    code = hook.__code__
    plain = not code.co_freevars and code.co_argcount == ARGUMENTS and code.co_nlocals == ARGUMENTS
    return (
        plain
        and code.co_names == ("requires_grad_",)
        and False not in code.co_consts
        # It may ask for what nobody leaves out: another value in the output's place, gradients of the module.
        and all(_of_asking(step, code.co_varnames[-1]) for step in dis.get_instructions(code))
    )


def _of_asking(step: dis.Instruction, output: str) -> bool:
    return step.opname in CALLING or (step.opname in LOADS and step.argval == output)


def output_needs_hooks(output: Any) -> bool:
    """Whether a module that returned this, and ran eagerly, makes use of outputs that ask for gradients."""
    tensors = [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad]
    if not all(any(map(_is_of_weight, _behind(tensor))) for tensor in tensors):
        return True  # else it would have none
    # torch.utils.checkpoint, with use_reentrant=True
    return any(node.name() == "CheckpointFunctionBackward" for node in _behind(*tensors))


def _behind(*tensors: Tensor) -> Iterator[Node]:
    """What the gradients of these go through."""
    waiting, known = [tensor.grad_fn for tensor in tensors], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]


def _is_of_weight(node: Node) -> bool:
    return isinstance(getattr(node, "variable", None), Parameter)


@contextmanager
def left_out(hooks: list[FunctionType]) -> Iterator[None]:
    """Inside, Dynamo takes these functions for ones that do nothing."""
    before = dynamo_config.ignore_logging_functions
    dynamo_config.ignore_logging_functions = cast(Any, _With(before, hooks))
    try:
        yield
    finally:
        dynamo_config.ignore_logging_functions = before


class _With(list[Any]):
    """An empty list, of which Dynamo is told otherwise: torch 2.11 writes down as JSON what is in this setting."""

    def __init__(self, others: Any, hooks: list[FunctionType]) -> None:
        super().__init__()
        self._others, self._hooks = others, hooks

    def __contains__(self, function: object) -> bool:
        return function in self._others or any(function is hook for hook in self._hooks)

    def __iter__(self) -> Iterator[Any]:
        yield from self._others
        yield from self._hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return []  # what is written down is a copy, which would be made of what one iterates over
