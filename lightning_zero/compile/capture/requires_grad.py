"""Ignore user code that only makes activations require grad, which Dynamo cannot trace.

transformers and PEFT do so for reentrant checkpoints: in forward hooks on frozen embeddings
(``enable_input_require_grads``) and by ``hidden.requires_grad = True`` inside forward (T5, wav2vec2). Dynamo would
break the graph at each place. Compiled checkpoints do not need it.

Hooks are ignored unless the effect is visible: to an eager reentrant checkpoint, or in a returned output. Assignments
are ignored until traced code observes them; the function is then traced again with a graph break there.
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
    TENSOR_GETATTR,
    UNUSED_GRADIENTS,
    RestartAnalysis,
    TensorVariable,
    dynamo_config,
)
from lightning_zero.compat.graphs import EXAMPLE_VALUE
from lightning_zero.compat.tensors import tree_leaves

ARGUMENTS = 3  # module, its arguments, its output
# Instructions of Python 3.11 to 3.14 that load a local variable and that call a method.
LOADS = {"LOAD_FAST", "LOAD_FAST_BORROW"}
CALLING = {"RESUME", "LOAD_METHOD", "LOAD_ATTR", "LOAD_CONST", "KW_NAMES", "PRECALL", "CALL", "CALL_KW"}
CALLING |= {"POP_TOP", "RETURN_VALUE", "RETURN_CONST"}


def find_requires_grad_hooks(hooks: Iterable[Mapping[int, Any]]) -> list[FunctionType]:
    """Return the hooks that only call ``requires_grad_()`` on an output."""
    return [hook for some in hooks for hook in some.values() if _only_sets_requires_grad(hook)]


def _only_sets_requires_grad(hook: Any) -> bool:
    if not isinstance(hook, FunctionType):
        return False
    code = hook.__code__
    plain = not code.co_freevars and code.co_argcount == ARGUMENTS and code.co_nlocals == ARGUMENTS
    return (
        plain
        and code.co_names == ("requires_grad_",)
        and False not in code.co_consts
        # Ignored hooks must not return another output or change gradients of the module.
        and all(_is_allowed(step, code.co_varnames[-1]) for step in dis.get_instructions(code))
    )


def _is_allowed(step: dis.Instruction, output: str) -> bool:
    return step.opname in CALLING or (step.opname in LOADS and step.argval == output)


def output_needs_hooks(output: Any) -> bool:
    """Return True if the effect of the hooks is visible in the output of an eager module."""
    tensors = [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad]
    if not all(any(map(_is_parameter_leaf, _autograd_nodes(tensor))) for tensor in tensors):
        return True  # the output requires grad only because of a hook
    # torch.utils.checkpoint with use_reentrant=True
    return any(node.name() == "CheckpointFunctionBackward" for node in _autograd_nodes(*tensors))


def _autograd_nodes(*tensors: Tensor) -> Iterator[Node]:
    waiting, known = [tensor.grad_fn for tensor in tensors], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]


def _is_parameter_leaf(node: Node) -> bool:
    return isinstance(getattr(node, "variable", None), Parameter)


@contextmanager
def ignore_hooks(hooks: list[FunctionType]) -> Iterator[None]:
    """Return a context in which Dynamo treats these hooks as functions without effect."""
    before = dynamo_config.ignore_logging_functions
    dynamo_config.ignore_logging_functions = cast(Any, _HiddenList(before, hooks))
    try:
        yield
    finally:
        dynamo_config.ignore_logging_functions = before


class _HiddenList(list[Any]):
    """List that appears empty to torch 2.11, which writes this setting as JSON, but contains the hooks."""

    def __init__(self, others: Any, hooks: list[FunctionType]) -> None:
        super().__init__()
        self._others, self._hooks = others, hooks

    def __contains__(self, function: object) -> bool:
        return function in self._others or any(function is hook for hook in self._hooks)

    def __iter__(self) -> Iterator[Any]:
        yield from self._others
        yield from self._hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return []  # torch writes a copy, built by iteration


# Attributes of a tensor that depend on whether it requires grad.
_OBSERVING = {
    "requires_grad",
    "requires_grad_",
    "is_leaf",
    "grad",
    "grad_fn",
    "retain_grad",
    "register_hook",
    "backward",
}


@UNUSED_GRADIENTS
@contextmanager
def ignore_grad_leaves() -> Iterator[None]:
    """Return a context in which new traces ignore ``requires_grad = True`` on activations."""
    leaves = _IgnoredLeaves()
    makers = {
        ".call_function": _intercept(leaves.on_setattr),
        TENSOR_GETATTR: _intercept(leaves.on_getattr),
        ".call_method": _intercept(leaves.on_call),
        ".compile_and_call_fx_graph": _intercept(leaves.on_compile),
    }
    with UNUSED_GRADIENTS.replace(makers):
        yield


def _intercept(intercepted: Callable[..., Any]) -> Callable[[Any], Any]:
    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            return intercepted(plain, self, tx, *args, **kwargs)

        return method

    return make


class _IgnoredLeaves:
    def __init__(self) -> None:
        self._graphs: list[Any] = []  # graphs in which an assignment was ignored
        self._ended: list[Any] = []  # speculation logs of functions whose assignments must not be ignored

    def on_setattr(self, plain: Callable[..., Any], builtin: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(builtin, "fn", setattr) is setattr and len(args) == 3:
            tensor, name, value = args
            if _is_constant(name, "requires_grad") and _is_constant(value, True) and self._ignore(tx, tensor):
                return value
        return plain(builtin, tx, args, kwargs)

    def on_call(self, plain: Callable[..., Any], tensor: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        asks = name == "requires_grad_" and all(_is_constant(value, True) for value in [*args, *kwargs.values()])
        if asks and self._ignore(tx, tensor):
            return tensor
        self._check_observed(tx, tensor, name)
        return plain(tensor, tx, name, args, kwargs)

    def on_getattr(self, plain: Callable[..., Any], tensor: Any, tx: Any, name: str) -> Any:
        if name != "requires_grad_":  # called next
            self._check_observed(tx, tensor, name)
        return plain(tensor, tx, name)

    def on_compile(self, plain: Callable[..., Any], graph: Any, tx: Any, outputs: Any, root: Any) -> Any:
        if self._has(graph) and any(_could_require_grad(output) for output in outputs):
            self._retrace(tx)
        return plain(graph, tx, outputs, root)

    def _ignore(self, tx: Any, tensor: Any) -> bool:
        """Return True if traced code made the tensor and its gradient can be ignored."""
        ended = any(log is tx.speculation_log for log in self._ended)
        if (
            ended
            or not isinstance(tensor, TensorVariable)
            or tensor.source is not None
            or not _could_require_grad(tensor)
        ):
            return False
        self._graphs.append(tx.output)
        return True

    def _has(self, graph: Any) -> bool:
        return any(one is graph for one in self._graphs)

    def _check_observed(self, tx: Any, tensor: Any, name: str) -> None:
        if name in _OBSERVING and self._has(tx.output) and _could_require_grad(tensor):
            self._retrace(tx)

    def _retrace(self, tx: Any) -> None:
        self._ended.append(tx.speculation_log)
        tx.speculation_log.clear()  # it contains events after the new end of the graph
        raise RestartAnalysis(restart_reason="a tensor that was made a leaf may be asked for its gradient")


def _is_constant(variable: Any, value: Any) -> bool:
    return bool(variable.is_python_constant()) and variable.as_python_constant() == value


def _could_require_grad(tensor: Any) -> bool:
    value = tensor.as_proxy().node.meta.get(EXAMPLE_VALUE) if isinstance(tensor, TensorVariable) else None
    return isinstance(value, Tensor) and not value.requires_grad and (value.is_floating_point() or value.is_complex())
