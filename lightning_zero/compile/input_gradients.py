"""Hooks that only have a module's output ask for gradients, as transformers and PEFT put on a frozen embedding once
layers are checkpointed (``enable_input_require_grads``).

Reentrant checkpoints need that; others do not, and neither does compiled code, whatever it checkpoints. Dynamo cannot
trace ``requires_grad_()`` of what a graph computes: it gave up every frame around the embedding, one after the other,
which took minutes, and left graphs in pieces. So compiled code goes without these hooks, unless what they ask for is
seen: by a reentrant checkpoint, some of whose parts may stay eager, or because the output is handed to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast

from torch import Tensor

from lightning_zero.compat.compiler import dynamo_config
from lightning_zero.compat.tensors import tree_leaves

__all__ = ["asking", "left_out", "seen_in"]

ARGUMENTS = 3  # module, its arguments, its output


def asking(hooks: Iterable[Mapping[int, Any]]) -> list[FunctionType]:
    """Those of the hooks that do nothing but call ``requires_grad_()`` of an output."""
    return [hook for some in hooks for hook in some.values() if _only_asks(hook)]


def _only_asks(hook: Any) -> bool:
    if not isinstance(hook, FunctionType):
        return False
    code = hook.__code__
    plain = not code.co_freevars and code.co_argcount == ARGUMENTS and code.co_nlocals == ARGUMENTS
    return plain and code.co_names == ("requires_grad_",) and False not in code.co_consts


def seen_in(output: Any) -> bool:
    """Whether a module that returned this, and ran eagerly, makes use of outputs that ask for gradients."""
    tensors = [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad]
    if any(tensor.grad_fn is None for tensor in tensors):
        return True
    waiting, known = [tensor.grad_fn for tensor in tensors], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if node.name() == "CheckpointFunctionBackward":  # torch.utils.checkpoint, with use_reentrant=True
            return True
        waiting += [before for before, _ in node.next_functions]
    return False


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
