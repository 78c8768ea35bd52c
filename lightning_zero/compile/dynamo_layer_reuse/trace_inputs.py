"""Inputs of a trace besides guards: call arguments, tracer state, and pending writes to a module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.fx import Node
from torch.fx import traceback as fx_traceback

from lightning_zero.compat.compiler import TensorVariable
from lightning_zero.compat.dynamo import (
    ConstantVariable,
    DictVariable,
    ListVariable,
    SizeVariable,
    SubclassVariable,
    TupleVariable,
    dispatch_keys,
    existed_before,
    is_mutated,
)
from lightning_zero.compat.graphs import CUSTOM, EXAMPLE_VALUE
from lightning_zero.compat.tensors import FakeTensor, layout_key, size_key
from lightning_zero.compile.capture.dynamo_graph import node_storage

DEVICES = ("cpu", "cuda")
TENSORS = (TensorVariable, SubclassVariable)
CONTAINERS = (list, tuple, set, frozenset)
# Nested containers of a module that are searched for pending writes.
MAX_DEPTH = 3
# Types whose values are compared by type and repr.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class ReuseRejected(Exception):
    """A call is not known to be equal to an earlier one."""


class CallSignature:
    """Arguments of one call.

    Attributes:
        tensors: in order, as Dynamo's variables; symbolic sizes, too.
    """

    def __init__(self, tensors: list[Any], structure: tuple[Any, ...]) -> None:
        self.tensors = tensors
        self._structure = structure

    @classmethod
    def read(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallSignature:
        """Return the signature of a call.

        Raises:
            ReuseRejected: an argument cannot be compared.
        """
        tensors: list[Any] = []
        structure = [_structure(value, tensors) for value in args]
        named = [(name, _structure(value, tensors)) for name, value in kwargs.items()]
        return cls(tensors, (*structure, *named))

    @property
    def nodes(self) -> list[Node]:
        return [tensor.as_proxy().node for tensor in self.tensors]

    def check_equal(self, other: CallSignature) -> None:
        """Raise if the arguments differ, or share tensors in other places.

        Raises:
            ReuseRejected: says which.
        """
        if self._structure != other._structure:
            raise ReuseRejected("other arguments")
        layouts = [fake_layout(node.meta[EXAMPLE_VALUE]) for node in self.nodes]
        if layouts != [fake_layout(node.meta[EXAMPLE_VALUE]) for node in other.nodes]:
            raise ReuseRejected("tensor arguments of other layouts")
        for key in (lambda node: node, node_storage):  # type: ignore[misc]
            if _first_indices(list(map(key, self.nodes))) != _first_indices(list(map(key, other.nodes))):
                raise ReuseRejected("tensor arguments shared in other places")

    def pair(self, later: CallSignature) -> dict[Node, Any]:
        """Return the tensors of a later call by the nodes of this call."""
        return dict(zip(self.nodes, later.tensors, strict=True))


def fake_layout(value: Tensor | SymInt) -> tuple[Any, ...]:
    """Return all properties of a fake tensor, or of a size, that a trace depends on.

    Calls on sizes of equal formulas add equal guards on the symbols.
    """
    key: tuple[Any, ...]
    if isinstance(value, SymInt):
        key = "size", size_key(value)
    elif type(value) is FakeTensor:
        offset: Any = value.storage_offset()
        if type(offset) is not int:
            raise ReuseRejected("a symbolic offset")
        key = *layout_key(value), offset, value.requires_grad, value.is_leaf, value.grad_fn is None
    else:
        raise ReuseRejected("a tensor of another class")
    if None in key:
        raise ReuseRejected("sizes that depend on data")
    return key


def comparable(value: Any) -> Any:
    """Return a key that is equal for equal values. Objects of other types are equal to themselves only."""
    if isinstance(value, Tensor):
        return tensor_layout(value)
    if isinstance(value, PLAIN):
        return type(value), repr(value)  # 0.0 is equal to -0.0
    if type(value) in (tuple, list):
        return type(value), [comparable(item) for item in value]
    if type(value) in (dict, OrderedDict):
        return type(value), [(key, comparable(item)) for key, item in value.items()]
    if type(value) in (set, frozenset) and all(isinstance(item, PLAIN) for item in value):
        return type(value), {(type(item), repr(item)) for item in value}
    if type(value) is partial and not vars(value):  # transformers' GELU has one in each layer
        return type(value), comparable(value.func), comparable(value.args), comparable(value.keywords)
    return type(value), id(value)


def tensor_layout(value: Any) -> tuple[Any, ...]:
    """Return all properties of a tensor that a trace depends on."""
    if not isinstance(value, Tensor):
        return type(value), id(value)
    layout = value.shape, value.stride(), value.dtype, value.device, value.layout
    return type(value), *layout, value.requires_grad, value.is_leaf, dispatch_keys(value)


def _structure(value: Any, tensors: list[Any]) -> Any:
    if not value.is_realized() and value.source is not None:
        return "not realized", value.source  # realizing it would add guards
    value = value.realize()
    kind = type(value)
    if kind in (TensorVariable, SizeVariable):
        tensors.append(value)
        return "tensor", value.source  # an input of the graph may have more guards: only the same one is equal
    if kind is TupleVariable:
        return ("tuple", *(_structure(item, tensors) for item in value.items))
    if isinstance(value, ConstantVariable) and value.is_python_constant():
        return comparable(value.as_python_constant())
    raise ReuseRejected(f"an argument of type {kind.__name__}")


def _first_indices(values: list[Any]) -> list[int]:
    return [values.index(value) for value in values]


@dataclass(frozen=True)
class TracerState:
    """State of the tracer that a trace reads, and that its side effects change.

    Attributes:
        settings: of torch, which traced code may change.
        written: containers and tensors with pending writes, with their contents.
        hooks: numbers of hooks of tensors, and of values that custom autograd functions save.
        objects: ids of objects with pending writes.
    """

    settings: tuple[Any, ...]
    written: tuple[Any, ...]
    hooks: tuple[int, int]
    objects: Set[int] = field(compare=False)

    @classmethod
    def read(cls, tx: Any) -> TracerState:
        """Return the current state.

        Raises:
            ReuseRejected: a write cannot be compared.
        """
        effects = tx.output.side_effects
        found = effects.id_to_variable.items()
        # Most are tensors, of which only attributes are written. This runs for each layer.
        others = [(number, variable) for number, variable in found if type(variable) not in TENSORS]
        containers = {number: variable for number, variable in others if is_mutated(effects, variable)}
        written, owners = [*map(_contents, containers.values())], set()
        for owner, attributes in effects.store_attr_mutations.items():
            if existed_before(owner) or isinstance(owner, TensorVariable):
                written.append((owner, *((name, _contents(value)) for name, value in attributes.items())))
                owners.add(owner)
        objects = {*containers, *(number for number, variable in (found if owners else ()) if variable in owners)}
        hooks = len(effects.tensor_hooks), len(effects.save_for_backward)
        return cls(_settings(tx), tuple(written), hooks, objects)


def _contents(value: Any) -> tuple[Any, ...]:
    """Return a variable and its items. Dynamo's variables are equal to themselves only."""
    # Check is_realized() first: reading a lazy variable's class realizes it and mutates the dict being iterated.
    if not value.is_realized() or isinstance(value, TensorVariable | ConstantVariable):
        return (value,)
    if type(value) in (TupleVariable, ListVariable):
        return (value, *map(_contents, value.items))
    if type(value) is DictVariable:
        return (value, *((key.vt, _contents(item)) for key, item in value.items.items()))
    raise ReuseRejected(f"a write to a {type(value).__name__}")


def _settings(tx: Any) -> tuple[Any, ...]:
    """Return settings that Dynamo applies while it traces code that changes them."""
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES]
    grads = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    modes = tuple(tx.symbolic_torch_function_state.mode_stack), torch.get_default_dtype()
    notes = repr(fx_traceback.current_meta.get(CUSTOM))  # of torch.fx.traceback.annotate
    return (*casts, *grads, *modes, torch.are_deterministic_algorithms_enabled(), notes)


def is_written_to(module: nn.Module, objects: Set[int]) -> bool:
    """Return True if the ids ``objects`` include the module, a part of it, or a value of these.

    Dynamo applies writes after the graph. Until then the module lacks them, and a read of them adds no guard.
    """
    return bool(objects) and any(
        id(part) in objects or any(_contains(value, objects, MAX_DEPTH) for value in vars(part).values())
        for part in module.modules()
    )


def _contains(value: Any, objects: Set[int], depth: int) -> bool:
    if id(value) in objects:
        return True
    if depth == 0:
        return False
    if isinstance(value, dict):
        return any(_contains(item, objects, depth - 1) for item in value.values())
    return isinstance(value, CONTAINERS) and any(_contains(item, objects, depth - 1) for item in value)
