"""Decide how eager code reads ``module.weight``, and order reads and writes of shards.

=======================================  ===================================================================
when                                     result
=======================================  ===================================================================
inside ``reading_shards()``              the registered parameter, a shard: optimizers are made of these
inside ``reading_parameters()``          an ``nn.Parameter`` of the gathered weight, for ties in constructors
in a training step's forward             the gathered weight as a plain tensor
otherwise                                a :class:`GatheredWeight`, which forwards ``grad`` and ``requires_grad``
=======================================  ===================================================================

One :class:`WeightReader` serves all modules of an engine. Compiled code does not use it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import DisableTorchFunctionSubclass, Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_zero.compat.tensors import storage_key
from lightning_zero.errors import UnsupportedError
from lightning_zero.native import Executor
from lightning_zero.sharding.shard_tensor import gather_value, is_shard


class ShardSync:
    """Order reads and writes of shards that are not gathers.

    Eager code gets copies of weights. In-place writes to such a copy must reach the shards before they are read, and
    new values of shards must win over earlier copies. If ranks read each other's shards, a writer waits for the
    readers.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._readers: list[Callable[[], None]] = []

    def add_reader(self, wait: Callable[[], None]) -> None:
        """Register a function that waits until a background reader of the shards has finished."""
        self._readers.append(wait)

    def wait_for_readers(self) -> None:
        """Wait for all registered background readers."""
        for wait in self._readers:
            wait()

    def before_reading(self) -> None:
        """Write pending in-place changes of gathered weights to the shards."""
        self._executor.weights.sync_user_writes()

    def flush_user_writes(self) -> None:
        """Write pending changes like :meth:`before_reading`, and ignore later changes of these copies."""
        self._executor.weights.sync_user_writes(forget=True)

    def before_overwriting(self, stepping: bool = False) -> None:
        """Prepare to write values that win over earlier copies. ``stepping``: the writer is an optimizer."""
        self.flush_user_writes()
        self.before_writing(stepping)

    def before_writing(self, stepping: bool = False) -> None:
        """Wait until no rank and no background save reads the shards. May be repeated.

        The next gather on this rank ends the write, unless :meth:`after_writing` does.
        """
        self.wait_for_readers()
        self._executor.weights.begin_writing(stepping)

    def after_writing(self) -> None:
        """Let other ranks read the written shards."""
        self._executor.weights.end_writing()

    def invalidate_copies(self) -> None:
        """Rebuild compute shards before their next read, because shards may have changed without notice.

        An exchange of ``param.data`` is such a change.
        """
        self._executor.weights.expire_compute_shards()


class _EqualElements(Tensor):
    """Hold the elements of ``module.weight == param``. It is true, so that sets and dicts find either."""

    __torch_function__ = nn.Parameter.__torch_function__  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return True


class GatheredWeight(Tensor):
    """Hold a full weight that forwards ``grad`` and ``requires_grad`` to its parameter.

    Results are plain tensors.
    """

    __torch_function__ = nn.Parameter.__torch_function__  # type: ignore[assignment]
    _zero_param: nn.Parameter
    _zero_reader: WeightReader

    @staticmethod
    def of(weight: Tensor, param: nn.Parameter, view: WeightReader) -> Tensor:
        """Turn ``weight`` into a GatheredWeight in place, and return it."""
        weight.__class__ = GatheredWeight
        weight.__dict__.update(_zero_param=param, _zero_reader=view)
        return weight

    # -- as the parameter itself

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return True

    @property
    def _is_param(self) -> bool:  # type: ignore[override]
        """Make ``isinstance(module.weight, nn.Parameter)`` True, but keep modules from registering it."""
        code, name = sys._getframe(2).f_code.co_name, sys._getframe(2).f_globals.get("__name__")
        return name != "torch.nn.modules.module" or code not in ("__setattr__", "register_parameter")

    def __hash__(self) -> int:
        with DisableTorchFunctionSubclass():
            return hash(self._zero_param)

    def __eq__(self, other: object) -> Any:
        result = Tensor.__eq__(self, other)  # type: ignore[arg-type]
        if isinstance(other, GatheredWeight) and other._zero_param is self._zero_param and type(result) is Tensor:
            result.__class__ = _EqualElements
        elif other is self._zero_param:
            result.__dict__["_zero_same"] = True
        return result

    # -- forwarded to the parameter

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """Return None, or with one rank the full gradient."""
        with DisableTorchFunctionSubclass():
            grad, record = self._zero_param.grad, self._zero_reader.find_record(self._zero_param)
            if grad is None:
                return None
            if record is not None and record.layout.world_size == 1:
                return record.layout.full_view(grad.as_subclass(Tensor).view(-1))
        raise self._no_gradient()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        raise self._no_gradient()

    def _no_gradient(self) -> UnsupportedError:
        record = self._zero_reader.find_record(self._zero_param)
        name = "weight" if record is None else record.name
        return UnsupportedError(
            f"{name!r} is the gathered weight, which has no gradient: each rank has a shard of the gradient. Use "
            f"`param.grad` of the registered parameter, `dict(self.named_parameters())[{name!r}].grad`. Its norms and "
            "sums are those of the full gradient. Elementwise changes work there, on every rank."
        )

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            return self._zero_param.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> GatheredWeight:
        """Set the flag of the parameter."""
        with DisableTorchFunctionSubclass():
            self._zero_param.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            return self._zero_param.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            return self._zero_param.register_post_accumulate_grad_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.detach().clone()
        with DisableTorchFunctionSubclass():
            copy.requires_grad_(self._zero_param.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # pickle the values only


_SETTERS = ("__set__", "__setitem__")


class DequantizedWeight(GatheredWeight):
    """Hold a frozen weight computed from its codes. A write to it would be lost, so writes raise."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if type(first) is cls and (in_place or name in _SETTERS or name.startswith("__i") and name != "__invert__"):
            raise first._written(name)
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if type(first) is cls and type(result) is Tensor and result.data_ptr() == first.data_ptr():
                return cls.of(result, first._zero_param, first._zero_reader)  # a view, such as ``weight.data``
        return result

    @staticmethod
    def of(weight: Tensor, param: nn.Parameter, view: WeightReader) -> Tensor:
        weight.__class__ = DequantizedWeight
        weight.__dict__.update(_zero_param=param, _zero_reader=view)
        return weight

    def _written(self, name: str) -> UnsupportedError:
        record = self._zero_reader.find_record(self._zero_param)
        return UnsupportedError(
            f"{name} would write to a copy of {'a frozen weight' if record is None else repr(record.name)}, which "
            "frozen_dtype stores as codes. Change its values on every rank inside `with "
            "lightning_zero.full_parameters(module): ...`."
        )


class _GatheredParameter(nn.Parameter):
    """Hold a gathered parameter while a model is built.

    Its memory is checked for writes, so ``data = x`` copies there. A value of another dtype changes the parameter's
    dtype, as in a plain module.
    """

    _zero_param: nn.Parameter

    def _write(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise UnsupportedError(
                f"The .data of {self._zero_param.__dict__['_zero_spec'].name!r} was given a tensor of shape "
                f"{tuple(value.shape)}, but the parameter has the shape {tuple(self.shape)}. Build the module with "
                "the new shape."
            )
        with torch.no_grad():
            if value.dtype == self.dtype:
                self.copy_(value)
                return
            full = gather_value(value) if is_shard(value) else value.detach()
            self._zero_param.__dict__["_zero_spec"].on_cast(full.to(self.device))
            with DisableTorchFunctionSubclass():
                full = torch.ops.lightning_zero.gather_eager(self._zero_param, list(self.shape), value.dtype)
            cast(Any, Tensor.data).__set__(self, full)

    data = property(lambda self: self.detach(), _write)


class WeightReader:
    """Hold the mode of eager reads, and remember the last one.

    It holds no strong reference to engine or parameters, because torch caches the classes that refer to it for longer
    than an engine lives.
    """

    def __init__(self) -> None:
        self._shards = self._parameters = self._forward = False
        self._given = False
        self._dequantized: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by storage: the weight, the record's index
        self._last_read: Callable[[], nn.Parameter | None] = lambda: None
        self._engine: Callable[[], Any] = lambda: None

    # -- the mode

    @contextmanager
    def reading_shards(self) -> Iterator[None]:
        """Inside, reads return registered parameters."""
        self._shards = True
        try:
            yield
        finally:
            self._shards = False

    @contextmanager
    def reading_parameters(self) -> Iterator[None]:
        """Inside, reads return an ``nn.Parameter``."""
        self._parameters = True
        try:
            yield
        finally:
            self._parameters = False

    def begin_forward(self) -> None:
        """Begin a training step's forward: reads return a plain tensor."""
        self._forward = True

    def end_forward(self) -> None:
        """End the forward, and its backward if there is one. May be repeated."""
        self._forward = False

    # -- reads

    @property
    def reads_shards(self) -> bool:
        """Return True if nothing is gathered on reads."""
        return self._shards

    def note_read(self, param: nn.Parameter) -> None:
        """Record that eager code is about to read this parameter."""
        self._last_read = weakref.ref(param)

    def wrap(self, weight: Tensor, param: nn.Parameter) -> Tensor:
        """Return the object that eager code gets for ``param``, given its gathered weight."""
        if self._parameters:  # `head.weight = embedding.weight` must see a Parameter
            gathered = _GatheredParameter(weight.detach(), param.requires_grad)
            gathered._zero_param = param
            for name in ("register_hook", "register_post_accumulate_grad_hook"):
                gathered.__dict__[name] = getattr(param, name)
            return gathered
        if self._forward and torch.is_grad_enabled():
            weight.__dict__["register_hook"] = param.register_hook  # outlives this read, as in a plain module
            return weight
        return GatheredWeight.of(weight, param, self)

    def read_packed(self, param: nn.Parameter) -> Tensor:
        """Return the object that eager code gets for a packed frozen weight."""
        record = self.find_record(param)
        self.note_read(param)
        with DisableTorchFunctionSubclass(), torch.no_grad():
            packed = record.unsharded
            if packed is None:
                packed = torch.ops.lightning_zero.gather_eager(param, list(record.layout.shape), torch.int32)
        if not (self._forward and torch.is_grad_enabled()):
            return DequantizedWeight.of(record.format.decode(packed), param, self)
        # Autocast would cast a copy, which autograd would save as a tensor of its own.
        device, dtype = packed.device.type, record.dtype
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device).itemsize < dtype.itemsize:
            dtype = torch.get_autocast_dtype(device)
        weight: Tensor = record.format.decode(packed, dtype)
        self._dequantized = {key: entry for key, entry in self._dequantized.items() if entry[0]() is not None}
        self._dequantized[storage_key(weight)] = weakref.ref(weight), record.index
        return weight

    def find_dequantized(self, tensor: Tensor) -> int:
        """Return the index of the record whose weight eager code holds in this tensor's memory; -1 for none."""
        found = self._dequantized.get(storage_key(tensor)) if self._dequantized else None
        return -1 if found is None or found[0]() is None else found[1]

    @property
    def last_read(self) -> nn.Parameter | None:
        """Return the parameter that eager code has read last, if it still exists."""
        return self._last_read()

    def note_functional_call_read(self) -> None:
        """Record that eager code has read a full weight set by ``torch.func.functional_call``."""
        self._given = True

    def pop_functional_call_read(self) -> bool:
        """Return True if such a read was recorded since the last call."""
        given, self._given = self._given, False
        return given

    # -- the engine

    def bind_engine(self, engine: Any) -> None:
        """Set the engine of the modules that are read through this object."""
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> Any:
        """Return the engine, or None after it is deleted."""
        return self._engine()

    def find_record(self, param: nn.Parameter) -> Any:
        """Return the record of a parameter, or None after its engine is deleted."""
        engine = self.engine
        return engine.sharder.find(param) if engine is not None else None
