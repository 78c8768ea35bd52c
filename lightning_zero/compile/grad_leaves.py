"""Code that asks for gradients of a tensor which nobody gets: ``hidden.requires_grad = True`` amid a forward.

transformers does so in front of checkpointed regions, whose reentrant kind needs an input that asks for one (T5 and its
kin, wav2vec2 and its); hooks that do so are removed before Dynamo sees them (``requires_grad_hooks.py``). Dynamo ends a
graph there, and each layer becomes one of its own. In compiled code both kinds of regions are the same, which needs no
such input, so nothing is done there, and the graph goes on.

A tensor whose gradient somebody does take is another matter, as in a gradient penalty. All that could tell is looked
for: such a flag is read, or anything is called or returned that would ask for gradients and now does not. Then the
function is traced once more, and its graph ends there after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_zero.compat.compiler import (
    COMPILE_GRAPH,
    TENSOR_GETATTR,
    UNUSED_GRADIENTS,
    OutputGraph,
    SetattrVariable,
    TensorVariable,
    RestartAnalysis,
)
from lightning_zero.compat.graphs import EXAMPLE_VALUE
from lightning_zero.compat.patches import swap_attribute

__all__ = ["ignore_grad_leaves"]

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
