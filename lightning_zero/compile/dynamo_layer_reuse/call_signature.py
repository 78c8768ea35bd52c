"""What a module is called with while Dynamo traces, and whether two calls are given the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from lightning_zero.compat.compiler import TensorVariable
from lightning_zero.compat.dynamo import ConstantVariable, TupleVariable
from lightning_zero.compat.graphs import EXAMPLE_VALUE
from lightning_zero.compat.tensors import FakeTensor
from lightning_zero.compile.dynamo_layer_reuse.reuse_rejected import Unlike
from lightning_zero.compile.dynamo_layer_reuse.trace_guards import constant
from lightning_zero.compile.capture.dynamo_graph import node_storage

__all__ = ["Given", "form_of"]


class Given:
    """Arguments of one call.

    Attributes:
        tensors: in order, as Dynamo's variables.
    """

    def __init__(self, tensors: list[Any], form: tuple[Any, ...]) -> None:
        self.tensors = tensors
        self._form = form

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
        """
        Raises:
            Unlike: there is something among them that nobody knows how to compare.
        """
        tensors: list[Any] = []
        form = [_form(value, tensors) for value in args]
        named = [(name, _form(value, tensors)) for name, value in kwargs.items()]
        return cls(tensors, (*form, *named))

    @property
    def nodes(self) -> list[Node]:
        return [tensor.as_proxy().node for tensor in self.tensors]

    def match(self, other: Given) -> None:
        """
        Raises:
            Unlike: this call is given something else, or the same tensor in other places.
        """
        if self._form != other._form:
            raise Unlike("it is given something else")
        forms = [form_of(node.meta[EXAMPLE_VALUE]) for node in self.nodes]
        if forms != [form_of(node.meta[EXAMPLE_VALUE]) for node in other.nodes]:
            raise Unlike("it is given tensors of another form")
        for alike in (lambda node: node, node_storage):  # type: ignore[misc]
            if _first_places(list(map(alike, self.nodes))) != _first_places(list(map(alike, other.nodes))):
                raise Unlike("it is given the same tensor in other places")

    def paired(self, later: Given) -> dict[Node, Any]:
        """For each node that this call is given what the other one is given there."""
        return dict(zip(self.nodes, later.tensors, strict=True))


def form_of(value: Tensor) -> tuple[Any, ...]:
    """All that decides how code goes on that is given a tensor."""
    if type(value) is not FakeTensor:
        raise Unlike("it is given a tensor of a kind of its own")
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(size) is int for size in sizes):
        raise Unlike("sizes are symbols")
    return value.shape, *sizes, value.dtype, value.device, value.requires_grad, value.is_leaf, value.grad_fn is None


def _form(value: Any, tensors: list[Any]) -> Any:
    if not value.is_realized() and value.source is not None:
        return "not looked at yet", value.source  # to look would be to guard it
    value = value.realize()
    kind = type(value)
    if kind is TensorVariable:
        tensors.append(value)
        return "tensor", value.source  # of one that was there before more may be guarded: only the same is alike
    if kind is TupleVariable:
        return ("tuple", *(_form(item, tensors) for item in value.items))
    if isinstance(value, ConstantVariable) and value.is_python_constant():
        return constant(value.as_python_constant())
    raise Unlike(f"it is given {kind.__name__}")


def _first_places(values: list[Any]) -> list[int]:
    return [values.index(value) for value in values]
