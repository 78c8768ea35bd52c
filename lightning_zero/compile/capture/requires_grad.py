"""Hooks that only have a module's output ask for gradients, as transformers and PEFT put on a frozen embedding once
layers are checkpointed (``enable_input_require_grads``).

Reentrant checkpoints need that; others do not, and neither does compiled code, whatever it checkpoints. Dynamo cannot
trace ``requires_grad_()`` of what a graph computes: it gave up every frame around the embedding, one after the other,
which took minutes, and left graphs in pieces. So compiled code goes without these hooks, unless what they ask for is
seen: by a reentrant checkpoint, some of whose parts may stay eager, or because the output is handed to the caller.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from lightning_zero.compat.compiler import (
    COMPILE_GRAPH,
    TENSOR_GETATTR,
    UNUSED_GRADIENTS,
    OutputGraph,
    RestartAnalysis,
    SetattrVariable,
    TensorVariable,
    dynamo_config,
)
from lightning_zero.compat.graphs import EXAMPLE_VALUE
from lightning_zero.compat.patches import swap_attribute
from lightning_zero.compat.tensors import tree_leaves

__all__ = ["asking", "ignore_grad_leaves", "left_out", "output_needs_hooks"]


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


# Of a tensor: what differs where it asks for a gradient.
_TELLING = {"requires_grad", "requires_grad_", "is_leaf", "grad", "grad_fn", "retain_grad", "register_hook", "backward"}


@UNUSED_GRADIENTS
@contextmanager
def ignore_grad_leaves() -> Iterator[None]:
    """Inside, what Dynamo traces for the first time, or anew, is traced so."""
    leaves = _Leaves()
    with (
        swap_attribute(SetattrVariable, "call_function", _instead(SetattrVariable.call_function, leaves.sets)),
        swap_attribute(TensorVariable, TENSOR_GETATTR, _instead(getattr(TensorVariable, TENSOR_GETATTR), leaves.reads)),
        swap_attribute(TensorVariable, "call_method", _instead(TensorVariable.call_method, leaves.calls)),
        swap_attribute(OutputGraph, COMPILE_GRAPH, _instead(getattr(OutputGraph, COMPILE_GRAPH), leaves.ends)),
    ):
        yield


def _instead(plain: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(plain, self, tx, *args, **kwargs)

    return method


class _Leaves:
    """Of what is traced by one call."""

    def __init__(self) -> None:
        self._graphs: list[Any] = []  # in which something was made a leaf, and is none
        self._ended: list[Any] = []  # logs, one for each function, of those that are not to be continued

    def sets(self, plain: Callable[..., Any], builtin: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(builtin, "fn", setattr) is setattr and len(args) == 3:
            tensor, name, value = args
            if _is(name, "requires_grad") and _is(value, True) and self._leaves_out(tx, tensor):
                return value
        return plain(builtin, tx, args, kwargs)

    def calls(self, plain: Callable[..., Any], tensor: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        asks = name == "requires_grad_" and all(_is(value, True) for value in [*args, *kwargs.values()])
        if asks and self._leaves_out(tx, tensor):
            return tensor
        self._look(tx, tensor, name)
        return plain(tensor, tx, name, args, kwargs)

    def reads(self, plain: Callable[..., Any], tensor: Any, tx: Any, name: str) -> Any:
        if name != "requires_grad_":  # which is called next
            self._look(tx, tensor, name)
        return plain(tensor, tx, name)

    def ends(self, plain: Callable[..., Any], graph: Any, tx: Any, outputs: Any, root: Any) -> Any:
        if self._has(graph) and any(_asks_for_none(output) for output in outputs):
            self._again(tx)
        return plain(graph, tx, outputs, root)

    def _leaves_out(self, tx: Any, tensor: Any) -> bool:
        """Whether code that is traced has made it, and goes on without a gradient for it."""
        ended = any(log is tx.speculation_log for log in self._ended)
        if ended or not isinstance(tensor, TensorVariable) or tensor.source is not None or not _asks_for_none(tensor):
            return False
        self._graphs.append(tx.output)
        return True

    def _has(self, graph: Any) -> bool:
        return any(one is graph for one in self._graphs)

    def _look(self, tx: Any, tensor: Any, name: str) -> None:
        if name in _TELLING and self._has(tx.output) and _asks_for_none(tensor):
            self._again(tx)

    def _again(self, tx: Any) -> None:
        self._ended.append(tx.speculation_log)
        tx.speculation_log.clear()  # of what comes behind the place where the graph ends this time
        raise RestartAnalysis(restart_reason="a tensor that was made a leaf may be asked for its gradient")


def _is(variable: Any, value: Any) -> bool:
    return bool(variable.is_python_constant()) and variable.as_python_constant() == value


def _asks_for_none(tensor: Any) -> bool:
    """Whether it could have a gradient, and does not ask for one."""
    value = tensor.as_proxy().node.meta.get(EXAMPLE_VALUE) if isinstance(tensor, TensorVariable) else None
    return isinstance(value, Tensor) and not value.requires_grad and (value.is_floating_point() or value.is_complex())
